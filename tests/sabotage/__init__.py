"""Deliberate bugs, each with the tests that must notice it. A rule that can be broken unnoticed is not held by a test.

`table.TABLE` has all rows; the modules beside it have those of one subject each. `patches` puts a bug into shipping code
and takes it out again. `plugin` and `child` break a rule for a whole run of pytest (`make sabotage`). `sim` has the
bugs that the simulator must find (`make sim-sabotage`).
"""
