"""What can go wrong with the machine or the cluster on it."""


class ClusterError(Exception):
    """Says what is missing or failed, where to look, and what to do about it."""
