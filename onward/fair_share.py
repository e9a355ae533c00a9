"""How much of a shared limit one caller may use."""


def within_fair_share(amount: int, used: int, used_by_others: int, limit: int, *, is_named: bool) -> bool:
    """Returns whether a caller that uses `used` of `limit` may use `amount` more, while all others use
    `used_by_others`.

    A named caller gets at most half of what the others leave, so that the next caller finds room. Without API keys
    there is one caller, which may use all.
    """
    free = limit - used_by_others
    return used + amount <= (free // 2 if is_named else free)
