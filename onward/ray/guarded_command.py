"""Runs a command that ends with its Ray node: `python -m onward.ray.guarded_command RAYLET ACTOR COMMAND …`.

RAYLET and ACTOR are process ids. Ray does not end the children of an actor when only the raylet of its node has died, and
starts the actor anew on another node. So this process watches both, and kills the command when either has ended. It is
a process of its own because an actor has threads, and a child that is to end with its parent needs a parent without any.
"""

import sys
from collections.abc import Sequence

from onward.ray import node_guard


def main(argv: Sequence[str]) -> int:
    raylet_pid, actor_pid, *command = argv
    try:
        watched = node_guard.watch_node(int(raylet_pid), int(actor_pid))
    except OSError:
        return node_guard.NODE_LOST
    return node_guard.run_guarded(command, watched)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
