"""Powers and logarithms that are rounded correctly. The C library and numpy choose code by CPU, and their last bits
differ.

A module of its own, because `rope_scaling` needs it before anything imports numpy.
"""

from decimal import Context, Decimal

_DECIMAL = Context(prec=40)


def power(base: float, exponent: float) -> float:
    return float(_DECIMAL.power(Decimal(base), Decimal(exponent)))


def log(value: float) -> float:
    return float(_DECIMAL.ln(Decimal(value)))


def square_root(value: float) -> float:
    return float(_DECIMAL.sqrt(Decimal(value)))
