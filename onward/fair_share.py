"""How much of a bound that callers share one of them may use."""


def within_fair_share(amount: int, own: int, of_others: int, bound: int, *, is_named: bool) -> bool:
    """Whether a caller that uses `own` may use `amount` more, beside `of_others` of all other callers.

    A named caller gets at most half of what the others leave, so that the next caller finds room. Without keys there is one
    caller, which may use all.
    """
    free = bound - of_others
    return own + amount <= (free // 2 if is_named else free)
