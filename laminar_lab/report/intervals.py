"""Step functions from intervals of time, and their integrals over bins. Vectorised and pure."""

import numpy as np

from laminar_lab.report.trajectories import Ints, Times
from laminar_py.records.codec import BoolArray


def step_function(start: Times, stop: Times) -> tuple[Times, Ints]:
    """Return a step function from intervals: from `at[i]` [n] on, `running[i]` of them are open."""
    at = np.concatenate([start, stop])
    change = np.concatenate([np.ones(len(start), np.int32), np.full(len(stop), -1, np.int32)])
    order = np.argsort(at, kind="stable")
    return at[order], np.cumsum(change[order]).astype(np.int32)


def summed_heights(start: Times, stop: Times, height: Times) -> Times:
    """Return the summed heights [2 n] of open intervals, from each time of `step_function` on."""
    order = np.argsort(np.concatenate([start, stop]), kind="stable")
    heights: Times = np.cumsum(np.concatenate([height, -height])[order])
    return heights


def integral(at: Times, on: BoolArray | Ints | Times, begin: Times, end: Times) -> Times:
    """Return for each step [S] the integral of a step function, e.g. the seconds in which a condition holds."""
    if len(at) < 2:
        return np.zeros(len(end))
    total = np.concatenate([[0.0], np.cumsum(np.diff(at) * on[:-1])])
    seconds: Times = np.interp(end, at, total) - np.interp(begin, at, total)
    return seconds


def area_of(start: Times, stop: Times, height: Times, begin: Times, end: Times) -> Times:
    """Return for each step [S] the integral of intervals with these heights."""
    at, _ = step_function(start, stop)
    return integral(at, summed_heights(start, stop, height), begin, end)


def covered_s(start: Times, length: Times, begin: Times, end: Times) -> Times:
    """Return the seconds of each step [S] that lie in at least one interval."""
    if not len(start):
        return np.zeros(len(end))
    at, depth = step_function(start, start + length)
    return integral(at, depth > 0, begin, end)
