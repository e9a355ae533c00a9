"""Limits on the cost of one grammar.

The library bounds what each token costs, and much of what compiling does, but not all of it: a few bytes of schema can
ask for minutes and gigabytes. Therefore a separate process compiles each grammar first (`checker_process`), and only a
grammar that has passed there is compiled in the serving processes.
"""

import llguidance

COMPILE_CPU_S = 2
"""Whole seconds of processor time, which is what the operating system counts."""
COMPILE_BYTES = 128 << 20
STEP_MAX_ITEMS = 20_000
"""Items of the parser for one mask: about 50 ms."""
MAX_LEXER_STATES = 50_000
"""Lexer states of one grammar over its life, at 1 to 2 kB each."""


def parser_limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        step_max_items=STEP_MAX_ITEMS, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
    )
