"""Who ran what where and when, as the pictures show it."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_lab.report.snapshot import read_snapshot
from laminar_lab.report.trace import lanes_of, occupancy
from laminar_lab.report.trajectories import ResidenceEnd, Residences
from laminar_py.records.events import Assigned, Dropped, Interrupted
from laminar_py.records.trajectory import DropReason, Kind
from tests.ledger.runs import begin, finish, issue, make_ready, open_ledger, run_to
from tests.report.scripted import TURNS, WITH_ENVIRONMENT, scripted
from tests.report.synthetic import simulate


def make_residences(rows):
    """Of (replica, version, start, end)."""
    replica, version, start, end = np.array(rows, np.float64).reshape(-1, 4).T
    of = np.arange(len(replica), dtype=np.int32)
    ints = (column.astype(np.int32) for column in (of, replica, version))
    ended = np.full(len(of), ResidenceEnd.FINISHED, np.int8)
    columns = (*ints, start, end, ended, np.zeros(len(of)))
    return Residences(**dict(zip(Residences.__dataclass_fields__, columns, strict=True)))


def residence():
    at = st.integers(0, 40)
    return st.tuples(st.integers(0, 2), st.integers(0, 5), at, at).map(
        lambda s: (*s[:2], min(s[2:]), max(s[2:]) + 1)
    )


@settings(deadline=None)
@given(st.lists(residence(), max_size=40))
def test_a_lane_has_one_stay_at_a_time_and_there_are_as_few_as_can_be(rows):
    residences = make_residences(rows)
    lanes = lanes_of(residences.replica, residences.start_s, residences.end_s)
    cells = Counter(
        (row[0], lane, t) for row, lane in zip(rows, lanes.tolist(), strict=True) for t in range(row[2], row[3])
    )
    assert set(cells.values()) <= {1}
    for replica in {row[0] for row in rows}:
        most = max(sum(row[0] == replica and row[2] <= t < row[3] for row in rows) for t in range(42))
        assert max(lane for row, lane in zip(rows, lanes.tolist(), strict=True) if row[0] == replica) + 1 == most


@settings(deadline=None)
@given(st.lists(residence(), max_size=40))
def test_occupancy_is_the_mean_of_what_runs_in_each_bin(rows):
    edges = np.arange(0.0, 45.0, 3.0)
    found = list(occupancy(make_residences(rows), edges=edges))
    assert [replica for replica, _, _ in found] == sorted({row[0] for row in rows})
    for replica, running, away in found:
        assert not away.any()
        for bin, (low, high) in enumerate(pairwise(edges)):
            total = sum(max(0, min(high, row[3]) - max(low, row[2])) for row in rows if row[0] == replica)
            assert np.isclose(running[bin], total / 3, atol=1e-5)


async def test_a_stay_that_ends_in_words_of_an_environment_has_the_version_of_the_turn_before(tmp_path):
    spans = [(0, 0, 2), (None, 2, 4), (1, 4, 5)]
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1))
        issue(ledger, "g0.0")
        run_to(ledger, "g0.0", spans[:2])
        ledger.append(Interrupted(trajectory_id="g0.0", epoch=1, length=4, reason="new_weights"))
        run_to(ledger, "g0.0", spans[2:], epoch=2, start=4)
        finish(ledger, "g0.0", spans, epoch=2)
    assert read_snapshot(tmp_path).residences.version.tolist() == [0, 1]


async def test_a_trajectory_is_away_the_share_of_its_time_that_its_environment_took_whatever_stays_it_has(
    tmp_path,
):
    async with scripted(tmp_path, WITH_ENVIRONMENT) as script:
        script.issue(0.0, "g0.0")
        script.issue(0.0, "g1.0", index=1)
        script.at(1.0, Interrupted(trajectory_id="g0.0", epoch=1, length=0, reason="new_weights"))
        script.at(2.0, Assigned("g0.0", 1, 2, 0))
        script.finish(5.0, "g0.0", epoch=2, spans=TURNS, environment_s=1.0)
    residences = read_snapshot(tmp_path).residences
    assert residences.trajectory.tolist() == [1, 1, 2]
    assert residences.away.tolist() == pytest.approx([0.25, 0.25, 0.25])  # the last one as the mean of those known


async def test_each_stay_has_its_replica_its_version_and_how_it_ended(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1))
        issue(ledger, "g0.0")
        run_to(ledger, "g0.0", [(0, 0, 3)])
        ledger.append(Interrupted(trajectory_id="g0.0", epoch=1, length=3, reason="repacked"))
        run_to(ledger, "g0.0", [(1, 3, 5)], replica=1, epoch=2, start=3)
        finish(ledger, "g0.0", [(0, 0, 3), (1, 3, 5)], epoch=2)
        make_ready(ledger, "e0.0", kind=Kind.EVAL, index=9)
        issue(ledger, "g0.1")
        ledger.append(Assigned("g0.1", 2, 1, 0))
        ledger.append(Dropped("g0.1", DropReason.STALE))
        issue(ledger, "g0.2")
        ledger.append(Assigned("g0.2", 3, 1, 0))
    snapshot = read_snapshot(tmp_path)
    residences = snapshot.residences
    rows = zip(
        *(c.tolist() for c in (residences.trajectory, residences.replica, residences.version, residences.end)),
        strict=True,
    )
    moved, finished, dropped, running = (
        ResidenceEnd.MOVED,
        ResidenceEnd.FINISHED,
        ResidenceEnd.DROPPED,
        ResidenceEnd.OPEN,
    )
    expected = [
        (1, 0, 0, moved),
        (1, 1, 1, finished),
        (2, 0, 0, finished),
        (3, 2, -1, dropped),
        (4, 3, -1, running),
    ]
    assert list(rows) == expected
    assert snapshot.is_eval.tolist() == [False, True, False, False]
    assert (residences.end_s >= residences.start_s).all()
    assert residences.end_s[-1] == snapshot.end_s


async def test_what_runs_at_a_moment_is_what_the_events_say(tmp_path):
    await simulate(tmp_path / "run", steps=4)
    snapshot = read_snapshot(tmp_path / "run")
    edges = np.linspace(0.0, snapshot.end_s, 50)
    areas = sum(running.sum() for _, running, _ in occupancy(snapshot.residences, edges=edges)) * edges[1]
    lasted = (snapshot.residences.end_s - snapshot.residences.start_s).sum()
    assert np.isclose(areas, lasted, rtol=1e-4)
    assert (snapshot.residences.end == ResidenceEnd.MOVED).any()
