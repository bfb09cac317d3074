"""Reference, scorers and learner: what a process died over is done by the next one. Without processes."""

import asyncio
from pathlib import Path

import pytest

from laminar_py.config.loading import load_config
from laminar_py.learner.packing.packer import Packed
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.observe.stats import Stats, Totals
from laminar_py.records.codec import decode, encode
from laminar_py.records.columns import Dtype, Source
from laminar_py.records.host import SystemClock
from laminar_py.records.metrics import LearnerStarted
from laminar_py.records.pieces import ColumnRef
from laminar_py.records.scoring import Score, Unscored
from laminar_py.records.weights import Published
from laminar_py.reward.stage import ScoringStage
from laminar_py.runtime.cluster.errors import PartCrashedError
from laminar_py.runtime.cluster.placement import Needs, Node, Placement
from laminar_py.runtime.workers.incarnation import Supervisor
from laminar_py.runtime.workers.learner import FrozenStage, LearnerKeeper
from laminar_py.runtime.workers.scorers import Scorers
from laminar_py.runtime.workers.specs import (
    FetchRequest,
    FrozenAnswer,
    FrozenRequest,
    FrozenSpec,
    LearnerSpec,
)
from tests.builders import make_finished, make_ref
from tests.reward.requests import make_requests
from tests.runs.runs import REPO
from tests.workers.fakes import Processes, Segments, make_incarnation

PATIENCE_S = 10.0


def incarnation(path, *settings, **needs):
    config = load_config(REPO / "configs/quickstart.yaml", list(settings))
    needed = Needs(**({"ranks": 1, "rank_gpus": 0, "replicas": 1, "replica_gpus": 0} | needs))
    return make_incarnation(
        config=config,
        run=RunFolder(path),
        placement=Placement(needed, lambda: [Node(id="a", ip="10.0.0.1", cpus=8, here=True)]),
        supervisor=Supervisor(record=lambda event: None, max_restarts=9),
        stats=Stats(SystemClock(), replicas=1, totals=Totals()),
    )


class Actor:
    """Starts at once, and works once it may."""

    def __init__(self):
        self.spec = None
        self.asked, self.may_work = asyncio.Event(), asyncio.Event()

    def start(self, data):
        self.spec = data

    def pid(self):
        return 7

    async def work(self):
        self.asked.set()
        await self.may_work.wait()


class Frozen(Actor):
    async def logprobs(self, data):
        await self.work()
        names = [one.id for one in decode(FrozenRequest, data).trajectories]
        logprobs = {name: LOGPROBS for name in names if name != "g0.9"}
        return encode(FrozenAnswer(logprobs, dict.fromkeys(names - logprobs.keys(), "gone"), 1.5))


LOGPROBS = ColumnRef(Dtype.FLOAT32, make_ref("reference-0-1-0.1"))


@pytest.mark.parametrize("source", [Source.REFERENCE, Source.TEACHER])
async def test_what_a_frozen_model_died_over_is_done_by_the_next_and_delivered_once(monkeypatch, tmp_path, source):
    processes = Processes(monkeypatch, lambda name: Frozen())
    shared = incarnation(tmp_path, stages=((source, 0),))
    stage = FrozenStage(shared, source, segments=Segments())
    async with asyncio.timeout(PATIENCE_S):
        await stage.bring_up()
        stage.submit_trajectory(make_finished("g0.0", response=2))
        stage.submit_trajectory(make_finished("g0.9", response=2))
        answering = asyncio.create_task(stage.next_answer(wanted=lambda name: True))
        first = await processes.next()
        await first.actor.asked.wait()
        first.die()
        second = await processes.next()
        second.actor.may_work.set()
        answer = await answering
    assert (answer.logprobs, answer.lost) == ({"g0.0": LOGPROBS}, {"g0.9": "gone"})
    assert shared.supervisor.restarts == {f"{source}-0": 1}
    assert decode(FrozenSpec, second.actor.spec).source is source
    assert shared.stats.totals.reference_busy_s == 1.5


class Scoring(Actor):
    def __init__(self):
        super().__init__()
        self.names, self.come = [], asyncio.Event()

    def start(self, data):
        return 1

    async def submit_responses(self, data):
        self.names += [one.id for one in decode(list[Unscored], data)]
        self.asked.set()
        self.come.set()

    async def next_scores(self, wait_s):
        await self.may_work.wait()
        await self.come.wait()
        self.come.clear()
        names, self.names = self.names, []
        return encode([Score(trajectory_id=name, value=1.0) for name in names])


async def test_what_a_scorer_died_over_is_scored_once_by_another_while_others_go_on(monkeypatch, tmp_path):
    processes = Processes(monkeypatch, lambda name: Scoring())
    scorers = Scorers(incarnation(tmp_path, "reward.workers=2"), segments=Segments())
    scored = asyncio.Queue()

    async def deliver(scores):
        for score in scores:
            scored.put_nowait((score.trajectory_id, score.value))

    async with asyncio.timeout(PATIENCE_S):
        scorers.spawn()
        first, second = await processes.next(), await processes.next()
        stage = ScoringStage(
            await scorers.start(),
            queue=8,
            wanted=lambda name: True,
            deliver=deliver,
            restart=scorers.restart,
        )
        running = asyncio.create_task(stage.run())
        for request in make_requests("a", "b"):
            stage.submit_response(Unscored(request=request))
        await first.actor.asked.wait()
        await second.actor.asked.wait()
        second.actor.may_work.set()
        assert await scored.get() == ("g0.1", 1.0)
        first.die()
        third = await processes.next()
        assert third.name == first.name
        third.actor.may_work.set()
        assert await scored.get() == ("g0.0", 1.0)
        running.cancel()
        await asyncio.wait([running])
    assert scored.empty()


class Rank(Actor):
    def start(self, data):
        self.spec = decode(LearnerSpec, data)
        return encode(LearnerStarted(num_parameters=1, attention="eager", attention_share=0.0))

    async def completed(self, version):
        await self.work()
        return encode(Published(version, "digest", 10, 0.0))

    async def fetch(self, data):
        found = decode(FetchRequest, data)
        return encode({one.id: "gone" for bundle in found.bundles for one in bundle if one.id.endswith("9")})


class Root:
    """The relays, of which the learner asks for the root."""

    keys = type("Keys", (), {"public": "p", "secret": "s"})
    chunk_bytes = 4096

    async def root_up(self):
        return "tcp://root"

    def store(self, node):
        return Path("store")


async def test_a_rank_that_dies_ends_all_and_the_next_ones_go_on_from_the_checkpoint(monkeypatch, tmp_path):
    processes = Processes(monkeypatch, lambda name: Rank())
    shared = incarnation(tmp_path, "learner.world_size=2", ranks=2)
    learner = LearnerKeeper(shared, relays=Root(), show=lambda progress: None)
    async with asyncio.timeout(PATIENCE_S):
        learner.spawn()
        ranks = [await processes.next(), await processes.next()]
        await learner.start(None)
        version = asyncio.create_task(learner.completed(3))
        await ranks[0].actor.asked.wait()
        ranks[0].die()
        with pytest.raises(PartCrashedError, match="learner-0: killed") as death:
            await version
        assert [rank.is_dead for rank in ranks] == [True, True]
        await learner.replace(death.value)
        await learner.start(Path("step-2-1.0"))
        fresh = [await processes.next(), await processes.next()]
        fresh[0].actor.may_work.set()
        assert (await learner.completed(3)).version == 3
    assert [rank.actor.spec.checkpoint for rank in (*ranks, *fresh)] == [None, None, "step-2-1.0", "step-2-1.0"]
    assert len({rank.actor.spec.rendezvous for rank in (*ranks, *fresh)}) == 2, "a meeting point of their own"
    assert shared.supervisor.restarts == {"learner-0": 1}


async def test_each_rank_reads_the_tokens_of_its_own_bundles_and_what_is_lost_is_told_once(monkeypatch, tmp_path):
    Processes(monkeypatch, lambda name: Rank())
    shared = incarnation(tmp_path, "learner.world_size=2", ranks=2)
    learner = LearnerKeeper(shared, relays=Root(), show=lambda progress: None)
    async with asyncio.timeout(PATIENCE_S):
        learner.spawn()
        await learner.start(None)
        bundles = [[[make_finished("g0.0"), make_finished("g0.9")]], [[make_finished("g1.0")]]]
        assert await learner.fetch(Packed(bundles, None)) == {"g0.9": "gone"}
