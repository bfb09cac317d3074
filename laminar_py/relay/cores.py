"""Number of cores that this process may use. Called by the modules here that start threads."""

import os


def num_cores() -> int:
    """Cores that the scheduler gives to this process, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0))
