"""Costs of waiting for the last ones: time of trajectories in their groups, slots and KV cache of replicas.

Three shares, each of one total:

- `group_wait` = sum of seconds that scored trajectories waited for the last member of their group, over the sum
  of the seconds that trajectories were live (issued until consumed or dropped, or until the last event on record).
- `slots` = sum over the samples of a replica in ramp-down of seconds x (usual - running), over the sum over all
  its samples of seconds x usual; both summed over replicas. `usual` is the 90th percentile of what the replica ran
  in the samples in which it ran anything; ramp-down is 0 < running < usual / 4: a few hold the replica.
- `kv` = the same with the use of the KV cache in place of running, in the same samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laminar_py.observe.analytics.measure.tails import group_wait
from laminar_py.observe.analytics.read.columns import Times, Trajectories
from laminar_py.records.metrics import FleetRow

_USUAL_PERCENTILE = 90
_RAMP_DOWN = 0.25
_LONGEST_S = 5.0  # a sample speaks for no longer: the controller was down


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Shares as the module says; None without anything to take a share of."""

    group_wait: float | None
    slots: float | None
    kv: float | None


def measure_stragglers(t: Trajectories, fleet: Sequence[FleetRow]) -> Stragglers:
    """Shares of all three totals; a replica has the samples in which it was there."""
    now = max(_last(column) for column in (t.issued_s, t.finished_s, t.scored_s, t.ended_s))
    live_s = float(np.nansum(np.where(np.isnan(t.ended_s), now, t.ended_s) - t.issued_s))
    waited_s = float(np.nansum(group_wait(t)))
    at = np.array([row.rl_s for row in fleet], np.float64)
    known = sorted({replica for row in fleet for replica in row.indices})
    column = {replica: place for place, replica in enumerate(known)}
    seconds, running, kv_use = np.zeros((3, len(fleet), len(column)))
    for sample, (row, elapsed_s) in enumerate(zip(fleet, np.diff(at, prepend=0.0), strict=True)):
        there = [column[replica] for replica in row.indices]
        seconds[sample, there] = np.clip(elapsed_s, 0.0, _LONGEST_S)
        running[sample, there], kv_use[sample, there] = row.running, row.kv_use
    return Stragglers(
        waited_s / live_s if live_s > 0 else None,
        _idle_share(seconds, running, running),
        _idle_share(seconds, running, kv_use),
    )


def _idle_share(seconds: Times, running: Times, used: Times) -> float | None:
    """Share of what is usually used, in ramp-down; all [S, R], 0 where a replica was not there."""
    ramp_down = (running > 0) & (running < _RAMP_DOWN * _usual(running, running))
    usual = _usual(running, used)
    total = float(np.sum(seconds * usual))
    idle = float(np.sum(np.where(ramp_down, seconds * np.maximum(usual - used, 0.0), 0.0)))
    return idle / total if total > 0 else None


def _usual(running: Times, used: Times) -> Times:
    """[R]"""
    columns = [used[running[:, replica] > 0, replica] for replica in range(used.shape[1])]
    return np.array([np.percentile(column, _USUAL_PERCENTILE) if len(column) else 0.0 for column in columns])


def _last(times: Times) -> float:
    known = times[~np.isnan(times)]
    return float(known.max()) if len(known) else 0.0
