"""How much one grammar may cost. The library bounds what each token costs, and much of what compiling does, but not all of
it: a few bytes of schema can ask for minutes and gigabytes. So a grammar is first compiled by a process that may be lost
(`check_process`), and only one that has passed there is compiled where others would suffer.
"""

import llguidance

COMPILE_CPU_S = 2
"""Whole seconds of processor time, which is what the operating system counts."""
COMPILE_BYTES = 128 << 20
STEP_MAX_ITEMS = 20_000
"""Of the parser, for one mask: about 50 ms."""
MAX_LEXER_STATES = 50_000
"""Of one grammar over its life, at 1 to 2 kB each."""


def parser_limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        step_max_items=STEP_MAX_ITEMS, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
    )
