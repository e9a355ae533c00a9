"""`make compat`: clients and suites of other projects against a real server, directly and through a router.

Each client is installed with a pinned version in a folder of its own under `build/compat`. Nothing of it is committed.
"""
