"""A cluster on Ray: instances and their router as supervised actors, on the machines that Ray has.

An actor runs `onward serve` or `onward router` as a child; these commands know nothing of Ray.
"""
