"""Seconds of each learner step, stage by stage, busy and idle, from arrays of the ledger.

`mean_step` averages them. A run measures nothing for this, so a killed run has these figures, too. Times are by
the run's clock. Undone steps, and steps in which a controller started, do not count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from laminar_lab.report.intervals import area_of, covered_s, integral, step_function, summed_heights
from laminar_lab.report.snapshot import History, find_presence
from laminar_lab.report.trajectories import Ints, Residences, Times, Trajectories
from laminar_py.config.run import RunConfig
from laminar_py.records.codec import BoolArray
from laminar_py.records.events import Relayed, VersionLoaded, VersionPublished

TAIL_SHARE = 0.25  # of its usual batch: a replica with fewer trajectories is in its tail
_REPLICA_COLUMNS = ("generation_s", "environment_s", "crowded_s", "tail_s", "late_s", "held_s")
USUAL = 0.9  # quantile of a replica's number of trajectories over its busy time: its usual batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Columns [S] in seconds, with one entry for each step that counts; columns of replicas are means over them.

    `measured_s = generation_s + environment_s + late_s + held_s = waited_s + learner_s`, e.g. 0.90 = 0.50 + 0.20 +
    0.05 + 0.15. On shared devices replicas are held in the learner's turns. A replica's busy time is divided
    between generation and environment: generation is the share of filled slots among the slots that its
    trajectories could fill if none were away in an environment.
    """

    step: Ints
    end_s: Times  # of its commit, since `origin_s`
    measured_s: Times  # since the previous commit
    generation_s: Times  # replicas have trajectories
    environment_s: Times  # replicas have trajectories, but slots are empty while environments work
    away: Times  # mean number of trajectories in environments, of all replicas together
    crowded_s: Times  # part of generation with more trajectories than decode slots
    tail_s: Times  # part of generation with less than `TAIL_SHARE` of the usual batch
    late_s: Times  # empty replicas wait for published weights, or load them
    held_s: Times  # empty replicas may start nothing, or replicas stand in the learner's turn
    reward_s: Times  # scorers are busy, mean over scorers
    reference_s: Times  # of the reference model and the teacher, as stages or in the learner
    waited_s: Times  # the learner has no batch
    learner_s: Times  # the learner trains, commits, publishes, or copies a checkpoint
    stall_s: Times  # part of `learner_s`: publishing
    transfer_s: Times  # some version is published and not yet at every relay
    load_s: Times  # for one replica to pull and load one version

    def __len__(self) -> int:
        return len(self.step)


def measure_pipeline(
    config: RunConfig, trajectories: Trajectories, residences: Residences, history: History
) -> Pipeline:
    """Return the columns of all steps that count; `trajectories` are training trajectories."""
    rows = [(done.step, at_s, done.waited_s, done.reference_s) for at_s, done in history.steps]
    step, end, waited, reference = np.array(rows, np.float64).reshape(-1, 4).T
    issued = trajectories.issued_s[~np.isnan(trajectories.issued_s)]
    begin: Times = np.concatenate([[issued.min(initial=end[0])], end[:-1]]) if len(end) else end
    counts = _is_whole(step, begin, end, history.starts_s)
    versions = _read_versions(history)
    scored = trajectories.scored_s
    known = ~np.isnan(scored)
    works = _working_clock(history.learner_turns if config.all_shared else [])
    stands_s = end - begin - (works(end) - works(begin))
    presence_s = _presence_s(config, history, begin, end)
    away_s = area_of(residences.start_s, residences.end_s, residences.away, begin, end)
    columns: dict[str, npt.NDArray[Any]] = {
        "step": step.astype(np.int32),
        "end_s": end,
        "measured_s": end - begin,
        **_replica_columns(
            config,
            replace(residences, start_s=works(residences.start_s), end_s=works(residences.end_s)),
            replace(versions, load_at_s=works(versions.load_at_s), load_since_s=works(versions.load_since_s)),
            {replica: there_s - stands_s for replica, there_s in presence_s.items()},
            (works(begin), works(end), counts),
        ),
        "away": away_s / np.maximum(end - begin, 1e-12),
        "reward_s": _sums_by_step(scored[known], trajectories.scorer_s[known] / config.reward.workers, begin, end),
        "reference_s": reference,
        "waited_s": np.minimum(waited, end - begin),
        "learner_s": np.maximum(end - begin - waited, 0.0),
        "stall_s": _sums_by_step(versions.published_s, versions.stall_s, begin, end),
        "transfer_s": covered_s(versions.published_s, versions.spread_s, begin, end),
        "load_s": _means_by_step(versions.load_at_s, versions.load_s, begin, end),
    }
    columns["held_s"] = columns["held_s"] + stands_s
    return Pipeline(**{name: column[counts] for name, column in columns.items()})


def _working_clock(turns: Sequence[tuple[float, float]]) -> Callable[[Times], Times]:
    """Return a function of times [N] that stands still in the learner's turns, each with begin and seconds."""
    if not turns:
        return lambda times: times
    begin, length = np.array(turns, np.float64).T
    edges = np.column_stack([begin, begin + length]).ravel()
    stood = np.repeat(np.cumsum(length), 2) - np.column_stack([length, np.zeros_like(length)]).ravel()
    return lambda times: times - np.interp(times, edges, stood)


def _is_whole(step: Times, begin: Times, end: Times, starts_s: Times) -> BoolArray:
    """Return whether each step [S] follows its predecessor and no controller started within it."""
    began = np.searchsorted(starts_s, end) > np.searchsorted(starts_s, begin, side="right")
    follows = np.concatenate([[True], np.diff(step) == 1]) if len(step) else step == 1
    whole: BoolArray = ~began & follows & (end > begin)
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class _Versions:
    """Publications [V] and loads [W]."""

    published_s: Times
    stall_s: Times
    spread_s: Times  # from publication until the last relay had it
    load_at_s: Times  # of the first serving of the version
    load_s: Times
    load_replica: Ints
    load_since_s: Times  # publication time of the loaded version


def _read_versions(history: History) -> _Versions:
    """Return the publications and loads of a run."""
    published, loads = list(history.of_kind(VersionPublished)), list(history.of_kind(VersionLoaded))
    since = {event.version: at_s for at_s, event in published}
    spread: dict[int, float] = {}
    for _, event in history.of_kind(Relayed):
        spread[event.version] = max(spread.get(event.version, 0.0), event.elapsed_s)
    return _Versions(
        published_s=np.array([at_s for at_s, _ in published], np.float64),
        stall_s=np.array([event.stall_s for _, event in published], np.float64),
        spread_s=np.array([spread.get(event.version, 0.0) for _, event in published], np.float64),
        load_at_s=np.array([at_s for at_s, _ in loads], np.float64),
        load_s=np.array([event.elapsed_s for _, event in loads], np.float64),
        load_replica=np.array([event.replica for _, event in loads], np.int32),
        load_since_s=np.array([since.get(event.version, at_s) for at_s, event in loads], np.float64),
    )


def _presence_s(config: RunConfig, history: History, begin: Times, end: Times) -> dict[int, Times]:
    """Return for each replica how many seconds of each step [S] it was part of the fleet.

    `begin` and `end` [S] are the times of the steps. `laminar scale` adds and removes replicas during a run.
    """
    presence = find_presence(history.happened, replicas=config.rollout.replicas)
    there = {replica: np.zeros(len(end)) for replica in presence.replicas}
    for replica, start_s, end_s in zip(presence.replica.tolist(), presence.start_s, presence.end_s, strict=True):
        there[replica] += np.maximum(0.0, np.minimum(end, end_s) - np.maximum(begin, start_s))
    return there


def _replica_columns(
    config: RunConfig,
    residences: Residences,
    versions: _Versions,
    there: dict[int, Times],
    steps: tuple[Times, Times, BoolArray],
) -> dict[str, Times]:
    """Return `_REPLICA_COLUMNS`, each [S]: means over replicas, weighted by their time in the fleet."""
    begin, end, counts = steps
    totals = {name: np.zeros(len(end)) for name in _REPLICA_COLUMNS}
    horizon = end[-1] if len(end) else 0.0
    order = np.argsort(residences.replica, kind="stable")
    sorted_replica = residences.replica[order]
    for replica, there_s in there.items():
        mine = order[
            np.searchsorted(sorted_replica, replica) : np.searchsorted(sorted_replica, replica, side="right")
        ]
        start_s = np.minimum(residences.start_s[mine], horizon)
        end_s = np.minimum(residences.end_s[mine], horizon)
        at, running = step_function(start_s, end_s)
        away = np.maximum(summed_heights(start_s, end_s, residences.away[mine]), 0.0)
        filled = _filled_share(running, away, config.rollout.max_batch)
        usual = min(_usual_number(_counted_time(at, begin, end, counts), running), config.rollout.max_batch)
        loaded = versions.load_replica == replica
        late = _late_intervals(at, running, versions.load_at_s[loaded], versions.load_since_s[loaded])
        busy_s = integral(at, running > 0, begin, end)
        generation_s = integral(at, filled, begin, end)
        totals["generation_s"] += generation_s
        totals["environment_s"] += busy_s - generation_s
        totals["crowded_s"] += integral(at, running - away > config.rollout.max_batch, begin, end)
        totals["tail_s"] += integral(at, (running < TAIL_SHARE * usual) * filled, begin, end)
        empty_s = np.maximum(0.0, there_s - busy_s)
        late_s = np.minimum(covered_s(*late, begin, end), empty_s)
        totals["late_s"] += late_s
        totals["held_s"] += empty_s - late_s
    count = sum(there.values(), np.zeros(len(end))) / np.maximum(end - begin, 1e-12)  # [S] on average
    return {name: total / np.maximum(count, 1e-12) for name, total in totals.items()}


def _filled_share(running: Ints, away: Times, slots: int) -> Times:
    """Return the share [n] of decode slots in use, among the slots that all `running` trajectories could use.

    `running` [n] trajectories are on the replica, and `away` [n] of them wait for their environment. The others
    decode, at most `slots` at a time.
    """
    share: Times = np.minimum(running - away, slots) / np.maximum(np.minimum(running, slots), 1)
    return share


def _counted_time(at: Times, begin: Times, end: Times, counts: BoolArray) -> Times:
    """Return these times on a clock that stands still outside the steps that count."""
    edges = np.column_stack([begin, end]).ravel()
    shown = np.cumsum(np.column_stack([np.zeros(len(end)), np.where(counts, end - begin, 0.0)]).ravel())
    return np.interp(at, edges, shown) if len(edges) else np.zeros(len(at))


def _usual_number(at: Times, running: Ints) -> float:
    """Return the `USUAL` quantile of `running` over the time in which it is above 0."""
    if len(at) < 2:
        return 0.0
    spans, levels = np.diff(at), running[:-1]
    spans, levels = spans[levels > 0], levels[levels > 0]
    order = np.argsort(levels)
    share = np.cumsum(spans[order]) / max(float(spans.sum()), 1e-12)
    return float(levels[order][np.searchsorted(share, USUAL).clip(0, len(order) - 1)]) if len(order) else 0.0


def _late_intervals(at: Times, running: Ints, load_at: Times, since: Times) -> tuple[Times, Times]:
    """Return begin and length of the times in which an empty replica waited for a published version or loaded it.

    A time begins with the publication, or when the replica became empty, and ends when it serves the version.
    """
    begins, lengths = [], []
    for served, published in zip(load_at.tolist(), since.tolist(), strict=True):
        place = int(np.searchsorted(at, served, side="right")) - 1
        if place >= 0 and running[place] == 0:
            begin = max(float(at[place]), published)
            begins.append(begin)
            lengths.append(max(0.0, served - begin))
    return np.array(begins), np.array(lengths)


def _sums_by_step(at: Times, value: Times, begin: Times, end: Times) -> Times:
    """Return for each step [S] the sum of the values at times within the step."""
    order = np.argsort(at)
    total = np.concatenate([[0.0], np.cumsum(value[order], dtype=np.float64)])
    first, last = (np.searchsorted(at[order], edge, side="right") for edge in (begin, end))
    sums: Times = total[last] - total[first]
    return sums


def _means_by_step(at: Times, value: Times, begin: Times, end: Times) -> Times:
    """Return for each step [S] the mean of the values at times within the step, 0 without any."""
    means: Times = _sums_by_step(at, value, begin, end) / np.maximum(
        _sums_by_step(at, np.ones(len(at)), begin, end), 1
    )
    return means
