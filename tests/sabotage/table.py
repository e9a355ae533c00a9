"""The table of all deliberate bugs. `make sabotage` puts in one after the other, and each must turn its tests red."""

from tests.sabotage import (
    access_and_limits,
    engine_steps,
    exactness,
    fairness,
    grammar,
    handoff,
    http,
    inputs,
    partial_output,
    reasoning,
    responses,
    router,
    scheduling,
    speculation,
    startup,
    supervision,
)

TABLE = [
    *engine_steps.TABLE,
    *grammar.TABLE,
    *reasoning.TABLE,
    *handoff.TABLE,
    *scheduling.TABLE,
    *router.TABLE,
    *access_and_limits.TABLE,
    *http.TABLE,
    *speculation.TABLE,
    *responses.TABLE,
    *exactness.TABLE,
    *inputs.TABLE,
    *fairness.TABLE,
    *startup.TABLE,
    *supervision.TABLE,
    *partial_output.TABLE,
]
