"""Errors of grammars, and of tokens under them. Knows no requests: the caller decides whose fault an error is."""


class InvalidGrammar(Exception):
    """It cannot be used, and the message says why: what it is made of is unknown, wrong, or too much."""


class TokenNotAllowed(Exception):
    """A token is not allowed where it stands."""

    def __init__(self, position: int) -> None:
        super().__init__(f"the grammar does not allow the token at position {position}")
        self.position = position


class GrammarLimitExceeded(Exception):
    """It has become too much for the library's limits in the middle of an output."""
