"""Learner and replicas on shared devices, simulated: they take turns, and hand-overs and lost caches cost time."""

from itertools import pairwise

import pytest

from laminar_lab.simulate.fleet import SimulatedFleet
from laminar_lab.simulate.learner import SimulatedLearner
from laminar_lab.simulate.run import simulate
from laminar_py.config.section import ConfigError
from laminar_py.control.lease import Holder
from laminar_py.ledger.database import reading
from tests.simulate.small import FAILING, run, run_recorded, small

SHARED = (
    "cluster.share=true",
    "rollout.engine.learner_devices=4",
    "rollout.engine.start_spread_s=0",
    "repack.planner=none",
    "rollout.on_new_weights=retract",
)
KEEPS = ("cluster.lease.cache=keep", "rollout.on_new_weights=in_place")


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ((), 4),
        (["rollout.engine.learner_devices=3"], 3),
        (["rollout.engine.learner_devices=8"], 4),
        (["rollout.engine.engine_devices=2"], 2),
        (["cluster.share=false"], 0),
    ],
)
def test_replicas_have_the_learners_gpus_as_far_as_these_go(settings, shared):
    assert small(*SHARED, *settings).shared_replicas == shared


def test_a_replica_with_more_gpus_than_the_learner_is_refused():
    with pytest.raises(ConfigError, match=r"cluster\.share=true: a replica has 8 GPUs, and the learner 4; raise"):
        small(*SHARED, "rollout.engine.engine_devices=8")


def watched_run(monkeypatch, *settings):
    """Simulate a run; return it and, for each learner step, the tokens that each replica made meanwhile."""
    engines, made, start = {}, [], SimulatedFleet._start_replica

    async def noting(fleet, index, *, late_s):
        life = await start(fleet, index, late_s=late_s)
        engines[index] = life.engine
        return life

    class Watching(SimulatedLearner):
        async def _learn(self, batch):
            before = tokens()
            metrics = await super()._learn(batch)
            made.append([now - was for now, was in zip(tokens(), before, strict=True)])
            return metrics

    def tokens():
        for engine in engines.values():
            engine.status()
        return [engines[index].num_tokens for index in sorted(engines)]

    monkeypatch.setattr(SimulatedFleet, "_start_replica", noting)
    return simulate(small(*SHARED, *settings), learner=Watching), made


@pytest.mark.parametrize("settings", [(), KEEPS, ("cluster.lease.switch=tail",)])
@pytest.mark.parametrize("schedule", ["sync", "one_step", "async"])
def test_no_shared_replica_generates_while_the_learner_steps(monkeypatch, settings, schedule):
    if schedule != "async":
        settings = (*settings, "rollout.on_new_weights=drain")
    done, made = watched_run(monkeypatch, *settings, f"schedule={schedule}")
    assert [row.trajectories for row in done.rows] == [384] * 6
    assert made == [[0] * 4] * 6
    holders = [one.event.holder for one in done.handed_over]
    assert holders[0] == Holder.REPLICAS
    assert all(a != b for a, b in pairwise(holders))
    assert done.figures.turns > 0


def test_a_replica_on_gpus_of_its_own_generates_while_the_learner_steps(monkeypatch):
    _, made = watched_run(monkeypatch, "rollout.engine.learner_devices=2")
    assert all(own > 0 for _, _, *others in made[1:] for own in others)
    assert all(shared == 0 for *both, _, _ in made for shared in both)


def test_a_released_cache_costs_prefills_and_memory_costs_the_time_of_the_profile():
    at_once = (*SHARED, "rollout.engine.simulation.publish_s=0")  # else another prefill follows new weights
    released, kept = run(*at_once).figures, run(*at_once, *KEEPS).figures
    assert released.recomputed_share > 0
    assert kept.recomputed_share == 0
    assert kept.handed_over_share < released.handed_over_share < 1
    assert released.recomputed_share < released.handed_over_share, "a hand-over lasts until responses continue"


def test_crashed_replicas_start_in_the_replicas_turn_and_nothing_is_lost(tmp_path):
    done, folder = run_recorded(tmp_path, *SHARED, *FAILING)
    assert len(done.failed_s) > 3
    assert [row.trajectories for row in done.rows] == [384] * 6
    with reading(folder) as connection:
        events = connection.execute(
            "SELECT kind, subject, json_extract(body, '$.holder') FROM event"
            " WHERE kind = 'leased' OR kind = 'partstarted' ORDER BY seq"
        ).fetchall()
    holder, starts = Holder.REPLICAS, []
    for kind, subject, new_holder in events:
        if kind == "leased":
            holder = new_holder
        elif "replica" in str(subject):
            starts.append(holder)
    assert set(starts) == {Holder.REPLICAS}


def test_a_shared_run_repeats():
    assert run(*SHARED).rows == run(*SHARED).rows


@pytest.mark.slow
def test_tail_waits_until_few_run_and_switches_less_often_than_ready():
    ready, tail = run(*SHARED, "steps=10").figures, run(*SHARED, "steps=10", "cluster.lease.switch=tail").figures
    assert tail.turns <= ready.turns
