"""Law 4 for what is replayed: with its recordings the learner is the sampler, however trajectories were broken up.

The sampler chooses experts by noisy logits and draws from a cut vocabulary; both stand for a sampler that differs
from the learner, as a bf16 one on other kernels does. Without the recordings the ratio of new to behaviour
probability is far from 1.
"""

import asyncio
import itertools
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from laminar_lab.audit.verify import verify
from laminar_py.config.algorithm import Aggregation
from laminar_py.engines.local.engine import LocalEngine
from laminar_py.engines.local.model import Routing
from laminar_py.engines.local.scheduler import Scheduler
from laminar_py.engines.sglang.engine import SGLangEngine
from laminar_py.engines.sglang.stream import Served
from laminar_py.learner.model import policy_logprobs
from laminar_py.learner.packing.packer import pack
from laminar_py.learner.step import Learner
from laminar_py.ledger.segments.reader import PayloadReader, complete_all
from laminar_py.records.engine import PauseMode, SamplingParams
from laminar_py.records.pieces import Recording
from laminar_py.records.replica import Assignment
from laminar_py.records.spans import Span, replace_spans
from laminar_py.records.trajectory import FinishReason, Kind, MicroBatch, Trajectory, TrajectoryRef
from laminar_py.rollout.running import begin
from laminar_py.rollout.storing import SegmentStore
from tests.engines.sglang.rig import make_model, running_server
from tests.events import make_assignment
from tests.learner.builders import make_learner, make_mixture_folder
from tests.repack.house import SLOTS, House

PATIENCE_S = 60.0
MAX_LEN, LAYERS, EXPERTS, TOP_K = 400, 2, 8, 2
SMALL = 500  # tokens of cache, for three trajectories or four
NOISE = 0.05  # of the logits that choose experts

HOUSE = {
    "interval_s": 0.05,
    "pace": 0.1,
    "sampling": SamplingParams(max_new_tokens=300, top_k=30, top_p=0.9, stop_ids=(2, 3)),
}


@pytest.fixture(autouse=True)
def noisy_router(monkeypatch):
    """Engines choose experts by other logits than the ones that weigh them, equally after every interruption."""
    best = Routing.best
    monkeypatch.setattr(Routing, "best", lambda self, scores: best(self, scores + NOISE * (40 * scores).sin()))


async def open_engine(folder: Path, *, slots=8, kv_capacity=None) -> LocalEngine:
    """A started one, without weights, that records everything."""
    room = {"max_batch": slots, "max_len": MAX_LEN, "kv_capacity": kv_capacity or slots * MAX_LEN}
    engine = LocalEngine(folder, **room, stream_interval=3, record=tuple(Recording))
    await engine.start()
    return engine


@dataclass
class Road:
    """A trajectory on its way through engines, as replicas hand it on: by references to what is in a segment."""

    assignment: Assignment
    store: SegmentStore
    streams: int = 0
    spans: tuple[Span, ...] = ()
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # its first tokens are here

    async def through(self, engines: list[LocalEngine]) -> TrajectoryRef:
        """Until it finishes; after every abort it goes on at the next engine."""
        while await self._stream(engines[self.streams % len(engines)]) is FinishReason.ABORT:
            continue
        item = self.assignment
        return TrajectoryRef(
            id=item.trajectory_id,
            prompt_id="p",
            group_id=item.group_id,
            sample_index=0,
            kind=Kind.TRAIN,
            prompt_ids=item.prompt_ids,
            tokens=item.tokens,
            num_trained=item.length,
            spans=self.spans,
            finish_reason=FinishReason.LENGTH,
            reward=1.0,
        )

    async def _stream(self, engine: LocalEngine) -> FinishReason | None:
        running = begin(self.assignment, 0.0)
        running.prefix = (await self.store.read(self.assignment)).ids
        self.streams += 1
        async for delta in engine.generate(running.request()):
            running.append_delta(delta, 0.0)
            self.begun.set()
        piece = running.unreported(0.0)
        kept = () if piece is None else (self.store.keep(piece),)
        told = running.pop_progress(kept[0] if kept else None, delta.finish_reason, 0.0)
        self.spans = replace_spans(self.spans, told.spans)
        item = self.assignment
        self.assignment = replace(item, epoch=item.epoch + 1, tokens=(*item.tokens, *kept))
        return delta.finish_reason


def roads(count: int, folder: Path) -> list[Road]:
    """Prompts of several lengths; neighbours are siblings. They share a segment in the folder."""
    out, store = [], SegmentStore(folder, "replica-0-1-0", PayloadReader(folder))
    for index in range(count):
        prompt = np.random.default_rng(index // 2).integers(3, 60, 4 + index // 2).astype(np.int32)
        sampling = SamplingParams(max_new_tokens=150 + index, top_k=30, top_p=0.9, seed=index)
        out.append(
            Road(
                make_assignment(f"t{index}", group_id=f"g{index // 2}", prompt_ids=prompt, sampling=sampling),
                store,
            )
        )
    return out


def completed(finished: list[TrajectoryRef], folder: Path) -> list[Trajectory]:
    """The same with their tokens, as a learner reads them."""
    complete, lost = complete_all(finished, PayloadReader(folder))
    assert not lost, lost
    return [complete[one.id] for one in finished]


def assert_whole(items: list[Trajectory]) -> None:
    """Every token has its mask, every input its experts."""
    for item in items:
        assert len(item.sampling_mask.counts) == len(item.response_ids)
        assert item.routed_experts.positions == item.num_tokens - 1


def deviations(learner: Learner, items: list[Trajectory]) -> np.ndarray:
    """The deviation of the ratio of new to behaviour probability from 1, for every token."""
    gaps = []
    for batch in microbatches_of(items):
        with torch.no_grad():
            logprobs = policy_logprobs(learner.model, batch)[0].numpy()
        gaps.append((logprobs - batch.behaviour_logprobs)[batch.loss_weights > 0])
    return np.abs(np.expm1(np.concatenate(gaps)))


def flipped(learner: Learner, items: list[Trajectory]) -> float:
    """The share of positions, over layers, whose recorded experts are not the learner's own choice."""
    seen: list[torch.Tensor] = []
    routers = [module for module in learner.model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(lambda _, __, output: seen.append(output[0])) for router in routers]
    flips = []
    for batch in microbatches_of(items):
        seen.clear()
        with torch.no_grad():
            policy_logprobs(learner.model, batch)
        own = torch.stack(seen, 1).topk(batch.experts.shape[-1]).indices.sort().values.numpy()
        routed = batch.experts[:, 0, 0] >= 0
        flips.append((np.sort(batch.experts, -1) != own).any(-1)[routed])
    for hook in hooks:
        hook.remove()
    return float(np.concatenate(flips).mean())


def microbatches_of(items: list[Trajectory]) -> list[MicroBatch]:
    """Microbatches of one rank."""
    packed = pack(items, max_tokens=2048, ranks=1, aggregation=Aggregation.TOKEN_MEAN, attention_share=0.0)
    return list(packed.microbatches(0))


def assert_replayed(learner: Learner, items: list[Trajectory]) -> None:
    """Ratio 1 with all that is recorded, and not without either part of it."""
    assert_whole(items)
    assert deviations(learner, items).max() < 1e-4
    assert flipped(learner, items) > 0.01
    assert deviations(learner, [replace(item, routed_experts=None) for item in items]).max() > 1e-2
    assert deviations(learner, [replace(item, sampling_mask=None) for item in items]).mean() > 1e-2


@pytest.fixture
def retractions(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How often a sequence lost its cache, from now on: True by a pause, False for want of room."""
    counts, retract = Counter[bool](), Scheduler._retract

    def counting(scheduler: Scheduler, slot: int) -> None:
        counts[scheduler._paused] += 1
        retract(scheduler, slot)

    monkeypatch.setattr(Scheduler, "_retract", counting)
    return counts


@pytest.mark.parametrize(
    ("mode", "caches"),
    [(PauseMode.ABORT, (None, SMALL)), (PauseMode.RETRACT, (SMALL,))],
    ids=["ABORT", "RETRACT"],
)
async def test_replay_holds_across_interruptions_and_engines(mode, caches, tmp_path, retractions):
    """The engine that ends the trajectories has too little cache, so that it retracts by itself too."""
    folder = make_mixture_folder(tmp_path / "model")
    engines = [await open_engine(folder, kv_capacity=cache) for cache in caches]
    ways = roads(12, tmp_path / "segments")
    try:
        for engine in engines:
            await engine.load_weights(folder, 1)
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(way.through(engines)) for way in ways]
            await ways[0].begun.wait()
            await engines[0].pause(mode)
            await engines[0].resume()
    finally:
        for engine in engines:
            await engine.close()
    assert {way.streams for way in ways} == {len(engines)}
    assert (retractions[True] > 0) == (mode is PauseMode.RETRACT)
    assert retractions[False] > 0
    finished = [task.result() for task in running]
    assert any(len(one.tokens) > 1 for one in finished) == (mode is PauseMode.ABORT)
    assert_replayed(make_learner(folder), completed(finished, tmp_path / "segments"))


async def test_replay_holds_for_trajectories_that_repacking_moved(tmp_path):
    folder = make_mixture_folder(tmp_path / "model")
    house = House(tmp_path, folder, open_engine=lambda: open_engine(folder, slots=SLOTS), replicas=3, **HOUSE)
    assert_replayed(make_learner(folder), await moved(house, tmp_path, count=10))


async def moved(house: House, run: Path, *, count: int) -> list[Trajectory]:
    """So many trajectories that finished after a move with tokens of theirs, as segments have them."""
    async with asyncio.timeout(4 * PATIENCE_S), house:
        await house.run_until(lambda: len(house.finished_after_a_move) >= count)
        found = house.finished_after_a_move
    assert verify(run) == []
    assert all(len(one.tokens) > 1 for one in found), "in pieces of two replicas at least"
    return completed(found, house.segments)


@pytest.mark.sglang
async def test_replay_holds_for_trajectories_that_repacking_moved_between_sglang_servers(tmp_path):
    """Their choice of experts is not perturbed, so that only their masks show the difference."""
    folder = make_model(tmp_path / "model", seed=0, experts=EXPERTS)
    (folder / "tokenizer.json").write_text("{}")
    async with AsyncExitStack() as stack:
        logs = [tmp_path / f"sglang-{index}.log" for index in range(2)]
        servers = [
            await stack.enter_async_context(running_server(folder, tmp_path, log=log, record=tuple(Recording)))
            for log in logs
        ]
        turn = itertools.cycle(servers)

        async def open_client():
            server = next(turn)
            served = Served(vocab=320, max_len=2040, experts_top_k=TOP_K, record=tuple(Recording))
            engine = SGLangEngine(
                server.url, api_key=server.api_key, served=served, stall_timeout_s=60, watch_server=server.watch
            )
            await engine.start()
            return engine

        house = House(tmp_path, folder, open_engine=open_client, replicas=2, publishes=False, **HOUSE)
        items = await moved(house, tmp_path, count=5)
    assert_whole(items)
    learner = make_learner(folder)
    assert deviations(learner, items).max() < 1e-4
    assert deviations(learner, [replace(item, sampling_mask=None) for item in items]).mean() > 1e-2
