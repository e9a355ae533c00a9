"""Failures that other engines had, each as a scenario in which it would show here: `onward sim --scenario F20`.

The numbers are those of the failures page. If a simulation cannot express a failure, the entry names the test that
covers it. Entries with a name instead of a number are states of load that seeds seldom reach, such as
`suspect-under-load`.
"""

from onward.sim.catalogue_entry import CatalogueEntry
from onward.sim.catalogue_kv import KV
from onward.sim.catalogue_load import LOAD
from onward.sim.catalogue_router import ROUTER
from onward.sim.catalogue_steps import STEPS

__all__ = ["SCENARIOS", "CatalogueEntry"]

SCENARIOS: dict[str, CatalogueEntry] = STEPS | KV | ROUTER | LOAD
