"""Stays as they are drawn: in lanes, and as the number that a replica ran. Pure; called by timeline and trace."""

import heapq

import numpy as np

from laminar_py.observe.analytics.read.columns import Floats, Ints, Times
from laminar_py.observe.analytics.read.stays import Stays


def lanes_of(replica: Ints, start_s: Times, end_s: Times) -> Ints:
    """Row [M] of each stay among those of its replica, the lowest that is free when it begins.

    With all stays of a replica given, its rows in use are what it ran at that moment.
    """
    lanes = np.zeros(len(replica), np.int32)
    order = np.lexsort((start_s, replica))
    rows = zip(*(column.tolist() for column in (order, replica[order], start_s[order], end_s[order])), strict=True)
    current, busy, free = None, list[tuple[float, int]](), list[int]()
    for place, own, start, end in rows:
        if own != current:
            current, busy, free = own, [], []
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lane))
        lanes[place] = lane
    return lanes


def occupancy(stays: Stays, *, replica: int, edges: Times) -> tuple[Floats, Floats, Floats]:
    """Mean number running on a replica, their mean version and how many of them are away: three of [B] bins.

    Bins lie between `edges` [B + 1]. The version is NaN where nothing ran. Exact, by integrals of steps up and
    down; but each is away at any moment by the share of its time.
    """
    mine = stays.replica == replica
    start, end = stays.start_s[mine], stays.end_s[mine]
    version = stays.version[mine].astype(np.float64)
    ones = np.ones_like(version)
    width = np.diff(edges)
    area = np.diff(_integral(start, ones, edges) - _integral(end, ones, edges))
    weighted = np.diff(_integral(start, version, edges) - _integral(end, version, edges))
    share = stays.away[mine]
    away = np.diff(_integral(start, share, edges) - _integral(end, share, edges))
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(area > 1e-9, weighted / area, np.nan)
    return (area / width).astype(np.float32), mean.astype(np.float32), (away / width).astype(np.float32)


def _integral(steps: Times, heights: Times, edges: Times) -> Times:
    """Integrals [B + 1] up to each edge, of a function that rises by `heights` at `steps`."""
    order = np.argsort(steps)
    steps, heights = steps[order], heights[order]
    count = np.searchsorted(steps, edges)
    rise = np.concatenate([[0.0], np.cumsum(heights)])[count]
    moment = np.concatenate([[0.0], np.cumsum(heights * steps)])[count]
    found: Times = edges * rise - moment
    return found
