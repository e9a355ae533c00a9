"""Checks whether two workers can exchange KV. Knows nothing of messages."""

from onward.proto.kv_transfer import KvLayout


def layout_difference(ours: KvLayout, theirs: KvLayout) -> str | None:
    """Returns each field that differs, with both values; None if the layouts are the same."""
    differences = [
        f"{field} is {getattr(ours, field)!r} here and {getattr(theirs, field)!r} there"
        for field in KvLayout.__struct_fields__
        if getattr(ours, field) != getattr(theirs, field)
    ]
    return "; ".join(differences) or None
