"""Whether KV can pass between two workers, and if not, why. Knows nothing of messages."""

from onward.proto.kv_transfer import KvLayout


def layout_difference(ours: KvLayout, theirs: KvLayout) -> str | None:
    """Names each field that differs, with both values. None: they are the same."""
    differences = [
        f"{field} is {getattr(ours, field)!r} here and {getattr(theirs, field)!r} there"
        for field in KvLayout.__struct_fields__
        if getattr(ours, field) != getattr(theirs, field)
    ]
    return "; ".join(differences) or None
