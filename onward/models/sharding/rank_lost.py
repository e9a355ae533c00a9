"""The error of an exchange with another rank that has ended, or that is being ended."""


class RankLost(Exception):
    """Another rank of the group is gone. The supervisor ends the group, so a rank that gets this error waits to be killed:
    an exit of its own could be taken for the reason why the group has ended."""
