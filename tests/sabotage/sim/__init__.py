"""Deliberate bugs that the simulator must find, each within a number of seeds."""
