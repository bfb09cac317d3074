"""The learner's loop with a real ledger, flow and checkpoints, and a learner that dies when the test says so."""

import asyncio
import re
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest

from laminar_lab.audit.verify import verify
from laminar_py.config.loading import load_config
from laminar_py.config.rollout import WithoutSignal
from laminar_py.control.lease import DeviceLease, Holder
from laminar_py.control.settings import control_settings
from laminar_py.control.steps import MIN_EMPTY
from laminar_py.learner.marker import read_marker
from laminar_py.ledger.database import reading, segments_path
from laminar_py.ledger.recovery import recover
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.ledger.segments.reader import PayloadReader, complete_all
from laminar_py.observe.stats import Stats, read_totals
from laminar_py.records.events import Undone
from laminar_py.records.host import SystemClock
from laminar_py.records.metrics import LearnerStarted, OrderFigures, StepMetrics
from laminar_py.records.scoring import Score
from laminar_py.records.weights import Published
from laminar_py.runtime.cluster.errors import PartCrashedError
from laminar_py.runtime.orchestrator.controller import train
from laminar_py.runtime.orchestrator.evaluator import Evaluator
from laminar_py.runtime.orchestrator.signals import SIGNALS
from laminar_py.runtime.orchestrator.trainer import StoppedError, StopRequest, Trainer
from laminar_py.runtime.orchestrator.versions import Versions
from laminar_py.runtime.workers.incarnation import Supervisor
from laminar_py.runtime.workers.specs import StepOutcome
from tests.control.fleet import Fleet, settle
from tests.events import run_started
from tests.ledger.runs import open_ledger
from tests.orchestrator.test_checkpoints import write_checkpoint
from tests.runs.runs import REPO
from tests.workers.fakes import make_incarnation

PATIENCE_S = 60
SMALL = ("schedule=sync", "rollout.prompts_per_step=2", "rollout.group_size=2", "learner.checkpoint_every=1")


class Learner:
    """Takes steps that change nothing; the checkpoints named in `fails`, by number, fail with what is there.

    What it is to train on it reads.
    """

    def __init__(self, fails, supervisor, reader):
        self._supervisor = supervisor
        self._reader = reader
        self.trained = []  # ids of each step
        self.lost = {}  # what is lost of trajectories, by id
        self.steps = self.saves = 0
        self._published = {}  # version -> steps taken
        self._fails = fails
        self._folder = None
        self.disk = asyncio.Event()  # cleared where it writes no checkpoint for now
        self.disk.set()
        self.on_save = lambda: None
        self.on_call = lambda name: None  # before each call that computes
        self.num_ranks, self.room, self.requested, self.resizing = 1, 2, None, asyncio.Event()
        self.fault = ""  # of its next checkpoint

    def spawn(self):
        pass

    def kill(self):
        pass

    async def start(self, checkpoint):
        self.on_call("start")
        self._taken = 0 if checkpoint is None else read_marker(checkpoint).step
        return LearnerStarted(num_parameters=1, attention="eager", attention_share=0.0, steps_taken=self._taken)

    async def replace(self, death):
        self._supervisor.crashed(death)

    def request(self, ranks):
        self.requested = ranks
        self.resizing.set()

    def drop_request(self):
        self.requested = None
        self.resizing.clear()

    async def resize(self):
        self.on_call("resize")
        self.resizing.clear()
        if self.requested > self.room:
            return False
        self.num_ranks, self.requested = self.requested, None
        return True

    async def fetch(self, packed):
        every = [one for bundles in packed.bundles for bundle in bundles for one in bundle]
        complete, lost = complete_all(every, self._reader)
        self.fetched = sorted(complete)
        return lost | {id: why for id, why in self.lost.items() if id in complete}

    async def step(self, terms, *, version):
        self.on_call("step")
        self.steps += 1
        self._taken += 1
        self.trained.append(self.fetched)
        self._published[version] = self._taken
        return StepOutcome(StepMetrics(loss=0.1, grad_norm=0.2, elapsed_s=0.0), version, 0.0)

    async def publish(self, version):
        self.on_call("publish")
        self._published[version] = self._taken

    async def completed(self, version):
        return Published(version, f"weights{self._published[version]}", 10, 0.0)

    async def stored(self):
        return []

    async def save(self, folder):
        self.on_call("save")
        self.saves += 1
        self._folder, self._saved = folder, self._taken
        self.on_save()

    async def saved(self):
        if self.saves in self._fails:
            raise self._fails[self.saves]
        await self.disk.wait()
        write_checkpoint(self._folder, step=self._saved)
        fault, self.fault = self.fault, ""
        return fault


@asynccontextmanager
async def training(path, *settings, fails, admission, shared=None, on_fault=pytest.fail, **options):
    """A trainer that has started, its learner and the fleet."""
    config = load_config(REPO / "configs/quickstart.yaml", [*SMALL, *settings])
    run, clock = RunFolder(path), SystemClock()
    run.checkpoints.mkdir()
    async with open_ledger(path) as ledger:
        ledger.append(run_started())
        segments = segments_path(path)
        fleet = Fleet(
            replicas=1,
            group_size=2,
            batch=2,
            schedule=admission,
            recorder=ledger,
            segments=segments,
            packing=control_settings(config, stop_ids=()).packing,
            publish_every=config.learner.publish_every,
            **options,
        )
        supervisor = Supervisor(record=ledger.append, max_restarts=3)
        learner = Learner(fails, supervisor, PayloadReader(segments))
        incarnation = make_incarnation(
            config=config,
            run=run,
            inputs=SimpleNamespace(sets={}, stream=SimpleNamespace(figures=OrderFigures())),
            clock=clock,
            ledger=ledger,
            stats=Stats(clock, replicas=1, totals=read_totals(run.metrics, 0)),
            supervisor=supervisor,
        )
        versions = Versions(incarnation, completed=learner.completed, stored=learner.stored)
        stop = StopRequest()
        record = ledger.append
        lease = DeviceLease(shared, config.cluster.lease, clock=clock, record=record)
        if shared is not None:
            learner.on_call = partial(shared.learner_computes, lease)
        trainer = Trainer(
            incarnation,
            scheduler=fleet.scheduler,
            learner=learner,
            evaluator=Evaluator(
                incarnation,
                scheduler=fleet.scheduler,
                replicas=None,
                dispatch_loop=None,
                hold=None,
                publish=None,
                show_line=None,
            ),
            versions=versions,
            lease=lease,
            stop=stop,
            show=lambda row: None,
            on_fault=on_fault,
        )
        recording = asyncio.create_task(versions.run())
        await trainer.start()
        fleet.scheduler.admit()
        incarnation.stats.set_rl_phase(True)
        try:
            yield trainer, learner, fleet
        finally:
            recording.cancel()
            await trainer.close()


class Shared:
    """Replicas on the learner's devices; the learner dies in the `dies_in`-th of its calls that compute."""

    def __init__(self, dies_in=None):
        self.computes = False
        self.calls = []
        self._dies_in = dies_in

    async def hold(self):
        await asyncio.sleep(0.01)
        self.computes = False

    async def release(self):
        self.computes = True

    def load(self):
        return 0, 0

    def learner_computes(self, lease, name):
        assert not self.computes
        assert lease.holder is Holder.LEARNER
        self.calls.append(name)
        if len(self.calls) == self._dies_in:
            raise PartCrashedError("learner-0", "killed by the test")


def by_place(group, index):
    return float(index % 2)


async def generate(fleet, wanted=lambda: True, reward=by_place, may=lambda: True):
    """What is handed out is finished and scored at once, by group and place, as long as that is wanted."""
    while wanted():
        if not may():
            await asyncio.sleep(0.001)
            continue
        fleet.versions[0] = fleet.scheduler.state.newest_version
        await fleet.report(0)
        await fleet.finish_all(0)
        waiting, fleet.unscored = fleet.unscored, []
        for trajectory in waiting:
            group, index = trajectory.id[1:].split(".")
            score = Score(trajectory_id=trajectory.id, value=reward(int(group), int(index)))
            await fleet.scheduler.incoming.on_score(score)
        await asyncio.sleep(0.001)


@asynccontextmanager
async def generating(fleet, **settings):
    task = asyncio.create_task(generate(fleet, **settings))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_learner_that_dies_over_the_last_checkpoint_trains_again(tmp_path):
    death = PartCrashedError("learner-0", "no space left")
    async with training(tmp_path, "steps=2", fails={3: death}, admission="sync") as (trainer, learner, fleet):
        trainer._went_back, back = lambda: back.append(trainer.step), []
        async with generating(fleet), asyncio.timeout(PATIENCE_S):
            await train(trainer, scheduler=fleet.scheduler)
        assert (trainer.step, learner.steps, learner.saves) == (2, 3, 4)
        assert back == [1], "staleness.control measures again from there"
    assert recover(tmp_path, exists=RunFolder(tmp_path).has).checkpoint.step == 2
    assert verify(tmp_path) == []


@asynccontextmanager
async def resizing(path, *settings, after=2, ranks=2, **options):
    """A trainer of four steps, after one of which other ranks are wanted; what it called, and lines."""
    seen = SimpleNamespace(calls=[], lines=[], faults=[])
    settings = ("steps=4", "learner.checkpoint_every=100", *settings)
    options |= {"fails": {}, "admission": "sync", "on_fault": seen.faults.append}
    async with training(path, *settings, **options) as (
        trainer,
        learner,
        fleet,
    ):
        learner.on_call, trainer._show_line = seen.calls.append, seen.lines.append
        trainer._stepped = lambda row, batch: learner.request(ranks) if row.step == after else None
        async with generating(fleet), asyncio.timeout(PATIENCE_S):
            yield trainer, learner, fleet, seen
    assert verify(path) == []


async def test_a_learner_gets_other_ranks_from_a_checkpoint_between_two_steps(tmp_path):
    async with resizing(tmp_path) as (trainer, learner, fleet, seen):
        await train(trainer, scheduler=fleet.scheduler)
        assert (learner.num_ranks, trainer._config.learner.world_size, trainer._stats.ranks) == (2, 2, 2)
        assert seen.calls == ["step", "step", "save", "resize", "start", "publish", "step", "step", "save"]
        assert seen.lines == ["after step 2 the learner goes from 1 to 2 ranks"]
        assert learner.steps == 4, "no step is made twice"


@pytest.mark.parametrize("call", ["save", "start", "publish"])
async def test_a_learner_that_dies_as_it_gets_other_ranks_has_them_in_the_end(tmp_path, call):
    async with resizing(tmp_path) as (trainer, learner, fleet, seen):

        def die(name):
            seen.calls.append(name)
            if learner.steps == 2 and seen.calls.count(call) == 1 and name == call:
                raise PartCrashedError("learner-0", "killed by the test")

        learner.on_call = die
        await train(trainer, scheduler=fleet.scheduler)
        assert (trainer.step, learner.num_ranks) == (4, 2)
        assert learner.steps == (6 if call == "save" else 4), "without the checkpoint it goes back to the first"


@pytest.mark.parametrize("withdrawn", [False, True])
async def test_a_request_that_is_withdrawn_or_comes_before_a_stop_in_the_checkpoint_changes_nothing(
    tmp_path, withdrawn
):
    async with resizing(tmp_path) as (trainer, learner, fleet, seen):

        def call(name):
            seen.calls.append(name)
            if name == "save" and trainer.step == 2:
                learner.drop_request() if withdrawn else trainer._stop.asked.set()

        learner.on_call = call
        await train(trainer, scheduler=fleet.scheduler)
        assert "resize" not in seen.calls
        assert (trainer.step, learner.num_ranks) == ((4 if withdrawn else 3), 1), "a begun batch is trained"


async def test_a_request_wakes_a_learner_that_waits_for_a_batch(tmp_path):
    async with resizing(tmp_path, after=-1) as (trainer, learner, fleet, _):
        running = asyncio.create_task(train(trainer, scheduler=fleet.scheduler))
        await asyncio.sleep(0)
        learner.request(2)
        await running
        assert (trainer.step, learner.num_ranks, learner.steps) == (4, 2, 4)


async def test_a_learner_keeps_its_ranks_without_room_and_without_a_sound_checkpoint(tmp_path):
    async with resizing(tmp_path, after=1) as (trainer, learner, fleet, seen):
        learner.room = 1
        trainer._stepped = lambda row, batch: learner.request(2) if row.step < 4 else None

        def call(name):
            seen.calls.append(name)
            learner.fault = "damaged" * (name == "save" and trainer.step == 2)

        learner.on_call = call
        await train(trainer, scheduler=fleet.scheduler)
        assert (trainer.step, learner.num_ranks, learner.steps) == (4, 1, 4)
        assert "start" not in seen.calls
        assert seen.lines == ["the learner keeps 1 rank, since step 2 has no sound checkpoint"]
        assert len(seen.faults) == 1


@pytest.mark.parametrize(("after", "setting"), [(2, None), (2, "max_rl_seconds=1"), (4, None)])
async def test_a_run_that_is_about_to_end_keeps_the_ranks_of_its_learner(tmp_path, after, setting):
    async with resizing(tmp_path, *filter(None, [setting]), after=after) as (trainer, learner, fleet, seen):
        request = trainer._stepped

        def end(row, batch):
            request(row, batch)
            if row.step == after and setting is None:
                trainer._stop.alarm("unsound")
            if row.step == after and setting is not None:
                trainer._stats.totals.rl_s += 10.0

        trainer._stepped = end
        await train(trainer, scheduler=fleet.scheduler)
        assert (trainer.step, learner.num_ranks) == (after, 1)
        assert "resize" not in seen.calls
        assert seen.calls.count("save") == (setting is not None), "an unsound state is not saved"


@pytest.mark.parametrize("dies_in", [None, 4, 5, 6, 7, 8])  # 1 to 3: start, publish, save
async def test_on_shared_devices_learner_and_replicas_compute_in_turns_also_over_a_death(tmp_path, dies_in):
    shared = Shared(dies_in)
    async with training(tmp_path, "steps=3", fails={}, admission="async", shared=shared) as (trainer, _, fleet):
        async with generating(fleet, may=lambda: shared.computes), asyncio.timeout(PATIENCE_S):
            await train(trainer, scheduler=fleet.scheduler)
        assert trainer.step == 3
        assert shared.computes, "after the last step the devices are the replicas'"
    assert shared.calls[:4] == ["start", "publish", "save", "step"]
    assert shared.calls.count("start") == (1 if dies_in is None else 2)
    with reading(tmp_path) as connection:
        rows = connection.execute("SELECT body FROM event WHERE kind = 'leased' ORDER BY seq").fetchall()
    holders = [msgspec.json.decode(body)["holder"] for (body,) in rows]
    assert holders[::2] == ["replicas"] * len(holders[::2])
    assert holders[1::2] == ["learner"] * len(holders[1::2])
    assert verify(tmp_path) == []


async def test_a_stop_while_a_dead_learner_is_replaced_gives_shared_devices_to_the_replicas(tmp_path):
    shared = Shared(dies_in=4)  # in its first step
    async with training(tmp_path, "steps=9", fails={}, admission="async", shared=shared) as (
        trainer,
        learner,
        fleet,
    ):

        async def stop(death):
            trainer._stop.asked.set()
            await asyncio.sleep(PATIENCE_S)

        learner.replace = stop
        async with generating(fleet, may=lambda: shared.computes), asyncio.timeout(PATIENCE_S):
            with pytest.raises(StoppedError):
                await train(trainer, scheduler=fleet.scheduler)
        assert shared.computes


async def test_a_stop_while_the_learner_waits_for_shared_devices_puts_its_batch_back(tmp_path):
    shared = Shared()
    settings = ("steps=9", "schedule=async", "cluster.lease.switch=tail")
    async with training(tmp_path, *settings, fails={}, admission="async", shared=shared) as (trainer, _, fleet):
        shared.load = lambda: (16, 0)
        async with generating(fleet, may=lambda: shared.computes):
            running = asyncio.create_task(train(trainer, scheduler=fleet.scheduler))
            async with asyncio.timeout(PATIENCE_S):
                while not fleet.scheduler.state.num_in_step:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                trainer._stop.asked.set()
                await running
        assert trainer.step == 0
        assert fleet.scheduler.state.num_in_step == 0, "the batch is ready again"
        assert shared.computes
    assert verify(tmp_path) == []


async def test_a_cancelled_wait_for_a_batch_leaves_no_task_and_puts_its_batch_back(tmp_path):
    shared = Shared()
    settings = ("steps=9", "schedule=async", "cluster.lease.switch=tail")
    async with training(tmp_path, *settings, fails={}, admission="async", shared=shared) as (trainer, _, fleet):
        shared.load = lambda: (16, 0)
        before = asyncio.all_tasks()
        waiting = asyncio.create_task(trainer.next_batch())
        async with generating(fleet, may=lambda: shared.computes), asyncio.timeout(PATIENCE_S):
            while not fleet.scheduler.state.num_in_step:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not waiting.done(), "it has a batch, and waits for the devices"
        waiting.cancel()
        await asyncio.wait([waiting])
        await settle()
        assert asyncio.all_tasks() <= before
        assert fleet.scheduler.state.num_in_step == 0, "the batch is ready again"


@pytest.mark.parametrize("lost", [["g0.1"], ["g0.0", "g0.1"]], ids=["one", "a group"])
async def test_a_batch_of_which_tokens_are_lost_is_put_back_and_the_step_goes_on_with_the_rest(tmp_path, lost):
    async with training(tmp_path, "steps=2", fails={}, admission="async") as (trainer, learner, fleet):
        learner.lost = dict.fromkeys(lost, "its segment is gone")
        async with generating(fleet), asyncio.timeout(PATIENCE_S):
            await train(trainer, scheduler=fleet.scheduler)
        assert (trainer.step, learner.steps) == (2, 2)
        trained = set().union(*learner.trained)
        assert not trained & set(lost)
        assert {"g0.0", "g1.0", "g1.1"} - set(lost) <= trained
        assert not {"g0.0", "g0.1"} & fleet.scheduler.state.live.keys()
    with reading(tmp_path) as connection:
        dropped = connection.execute("SELECT id, drop_reason FROM trajectory WHERE status = 'dropped'").fetchall()
        (counted,) = connection.execute("SELECT count(*) FROM trajectory WHERE step = 1").fetchone()
    assert dropped == [(id, "tokens_lost") for id in lost]
    assert counted == len(learner.trained[0]), "what was put back is consumed once"
    assert verify(tmp_path) == []


async def test_a_task_without_any_signal_ends_the_run_with_one_line_and_an_event(tmp_path):
    async with training(tmp_path, "steps=9", fails={}, admission="sync") as (trainer, learner, fleet):
        state = fleet.scheduler.state
        state.settings = replace(state.settings, without_signal=WithoutSignal.REFILL)
        async with generating(fleet, reward=lambda group, index: float(group % 4 == 0)):
            await asyncio.wait_for(train(trainer, scheduler=fleet.scheduler), PATIENCE_S)
        fault = trainer._stop.fault
        assert re.match(
            r"step 1, \d+ times in a row at rollout\.max_refill=4: 0 of 2 groups; 1,0\d\d others", fault
        )
        assert "25% are solved (all rewards the best of the run), 75% hopeless" in fault
        assert "\n" not in fault
        assert (learner.steps, trainer.step) == (0, 0)
    with reading(tmp_path) as connection:
        (count,) = connection.execute("SELECT count(*) FROM event WHERE kind = 'refillstopped'").fetchone()
    assert count >= MIN_EMPTY
    assert f"step 1, {count} times in a row" in fault
    assert recover(tmp_path).rewards == (0.0, 1.0)
    assert recover(tmp_path).refilled == (), "what the last ceiling dropped counts for no step to come"


@pytest.mark.parametrize("schedule", ["async", "one_step", "sync"])
async def test_a_run_where_one_group_in_a_hundred_has_signal_goes_on_to_its_last_step(tmp_path, schedule):
    def sparse(group, index):
        return float(group % 100 == 40 and index == 1)

    settings = ("steps=4", f"schedule={schedule}")
    async with training(tmp_path, *settings, fails={}, admission=schedule) as (trainer, learner, fleet):
        state = fleet.scheduler.state
        state.settings = replace(state.settings, without_signal=WithoutSignal.REFILL)
        async with generating(fleet, reward=sparse):
            await asyncio.wait_for(train(trainer, scheduler=fleet.scheduler), PATIENCE_S)
        assert (trainer._stop.fault, trainer.step, learner.steps) == (None, 4, 4)
        assert state.next_prompt > 300, "one group a step, out of a hundred"
    with reading(tmp_path) as connection:
        (count,) = connection.execute("SELECT count(*) FROM event WHERE kind = 'refillstopped'").fetchone()
    assert count > 4
    assert verify(tmp_path) == []


async def test_staleness_counts_steps_where_versions_are_fewer(tmp_path):
    """Under `sync` a batch begins under the newest version, which every other step leaves as it is."""
    settings = ("steps=5", "learner.publish_every=2")
    async with (
        training(tmp_path, *settings, fails={}, admission="sync") as (trainer, _, fleet),
        generating(fleet),
        asyncio.timeout(PATIENCE_S),
    ):
        await train(trainer, scheduler=fleet.scheduler)
    with reading(tmp_path) as connection:
        rows = connection.execute(
            "SELECT DISTINCT step, oldest_version, staleness FROM trajectory WHERE step > 0 ORDER BY step"
        ).fetchall()
    assert rows[:2] == [(1, 0, 0), (2, 0, 1)]
    assert all(staleness == step - 1 - 2 * oldest for step, oldest, staleness in rows), "two steps a version"
    assert verify(tmp_path) == []
    ages = recover(tmp_path).ages
    assert [ages.age_of(version) for version in range(4)] == [5, 3, 1, 0]


async def test_a_run_that_is_stopped_says_which_checkpoint_stands_if_its_last_is_lost(tmp_path, caplog):
    death = PartCrashedError("learner-0", "no space left")
    async with training(tmp_path, "steps=9", fails={2: death}, admission="sync") as (trainer, learner, fleet):
        trainer._stop.asked.set()
        async with generating(fleet), asyncio.timeout(PATIENCE_S):
            await train(trainer, scheduler=fleet.scheduler)
        assert (trainer.step, learner.saves) == (1, 2)
    assert (
        "the learner crashed, so the checkpoint of step 1 is lost; a resume starts from checkpoints/step-0-1.0"
        in caplog.messages
    )
    assert recover(tmp_path).checkpoint.step == 0


ASYNC = ("steps=9", "schedule=async")  # under sync the batch in hand is trained first


async def stopped_in_a_checkpoint(trainer, learner, fleet, path):
    """A run that is asked to stop as the checkpoint of step 1 is begun, on a disk that takes its time."""
    learner.disk.clear()
    learner.on_save = trainer._stop.asked.set
    running = asyncio.create_task(train(trainer, scheduler=fleet.scheduler))
    await asyncio.wait_for(generate(fleet, wanted=lambda: learner.saves < 2), PATIENCE_S)
    await settle()
    assert not running.done()
    assert SIGNALS._awaited == "the checkpoint of step 1"
    assert recover(path).checkpoint.step == 0, "it counts once it is on disk"
    return running


async def test_a_run_that_is_stopped_in_a_checkpoint_waits_for_it_and_says_so(tmp_path):
    async with training(tmp_path, *ASYNC, fails={}, admission="async") as (trainer, learner, fleet):
        running = await stopped_in_a_checkpoint(trainer, learner, fleet, tmp_path)
        learner.disk.set()
        await asyncio.wait_for(running, PATIENCE_S)
        assert (trainer.step, learner.saves) == (1, 2), "no second one is made of the same step"
    assert recover(tmp_path, exists=RunFolder(tmp_path).has).checkpoint.step == 1
    assert verify(tmp_path) == []


async def test_a_run_that_ends_at_once_in_a_checkpoint_resumes_from_the_one_before(tmp_path):
    async with training(tmp_path, *ASYNC, fails={}, admission="async") as (trainer, learner, fleet):
        running = await stopped_in_a_checkpoint(trainer, learner, fleet, tmp_path)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    recovered = recover(tmp_path, exists=RunFolder(tmp_path).has)
    assert recovered.checkpoint.step == 0
    assert len([event for event in recovered.events if isinstance(event, Undone)]) == 4, "step 1 is undone"
    assert verify(tmp_path) == []


async def test_whatever_a_checkpoint_fails_with_ends_the_run_though_no_batch_comes(tmp_path):
    full = OSError(28, "No space left on device")
    async with (
        training(tmp_path, "steps=9", fails={2: full}, admission="sync") as (trainer, learner, fleet),
        generating(fleet, wanted=lambda: learner.saves < 2),
    ):
        with pytest.raises(OSError, match="No space left"):
            await asyncio.wait_for(train(trainer, scheduler=fleet.scheduler), PATIENCE_S)


async def test_under_sync_a_stop_waits_for_no_batch_that_nobody_completes(tmp_path):
    """Several steps' groups are live, as after a learner's death; one of them is still being generated."""
    async with training(tmp_path, "steps=9", fails={}, admission="async") as (trainer, _, fleet):
        await fleet.report(0)
        for id in [id for id in fleet.running[0] if id.split(".")[0] in ("g0", "g1")]:
            await fleet.finish(0, id)
        await fleet.score_all()
        assert len(fleet.scheduler.state.groups) > 2
        trainer._stop.asked.set()
        async with asyncio.timeout(PATIENCE_S):
            await train(trainer, scheduler=fleet.scheduler)
        assert trainer.step == 1


@pytest.mark.parametrize("interrupted", [False, True])
async def test_a_run_that_fails_waits_for_no_batch_under_sync_and_leaves_a_checkpoint(tmp_path, interrupted):
    """Before it is asked to stop, or while it waits for the batch in hand."""
    async with training(tmp_path, "steps=9", fails={}, admission="sync") as (trainer, _, fleet):
        running = asyncio.create_task(train(trainer, scheduler=fleet.scheduler))
        await asyncio.wait_for(generate(fleet, wanted=lambda: trainer.step < 1), PATIENCE_S)
        await fleet.report(0)
        assert fleet.scheduler.state.groups, "a batch has begun, and is never completed"
        if interrupted:
            trainer._stop.asked.set()
            await settle()
            assert not running.done()
        trainer._stop.fail("nothing can be scored")
        trainer._stop.fail("something else")
        await asyncio.wait_for(running, PATIENCE_S)
        assert trainer._stop.fault == "nothing can be scored"
    assert recover(tmp_path, exists=RunFolder(tmp_path).has).checkpoint.step == trainer.step >= 1
    assert verify(tmp_path) == []


async def test_a_stop_says_what_a_second_signal_would_lose(tmp_path):
    settings = ("steps=9", "learner.checkpoint_every=3")
    async with training(tmp_path, *settings, fails={}, admission="async") as (trainer, _, fleet):
        assert trainer._cost_of_end() == "no step is lost, and a resume goes on from the checkpoint of step 0"
        running = asyncio.create_task(train(trainer, scheduler=fleet.scheduler))
        await asyncio.wait_for(generate(fleet, wanted=lambda: trainer.step < 2), PATIENCE_S)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        trainer._stats.begin_step()
        assert trainer._cost_of_end() == (
            f"steps 1 to {trainer.step} and 0 s of work on step {trainer.step + 1} would be lost, and a resume"
            " goes on from the checkpoint of step 0"
        )
