"""A token table in which the marks of a format are text.

Readers are not shown special tokens, but some models write the marks around calls and thoughts as such tokens: whoever
takes the text apart must see them. All other special tokens stay hidden.
"""

from collections.abc import Collection

from onward.text.token_table import TokenTable


def with_visible_markers(table: TokenTable, marks: Collection[str]) -> TokenTable:
    """Made once for a model. The same table where no mark is a special token."""
    wanted = {mark.encode() for mark in marks}
    shown = {token_id for token_id in table.special_ids if table.token_bytes_list[token_id] in wanted}
    if not shown:
        return table
    return TokenTable(table.token_bytes_list, table.special_ids - shown, table.strips_leading_space)
