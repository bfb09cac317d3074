"""The learner's ranks, called and restarted together, and the two parts beside them that hold a model.

Owned by the controller. `FrozenStage` has the queue before a frozen model (the reference or the teacher), its
process and its restart: the scheduler submits finished trajectories, and the loop `collect_logprobs` records the
answers, without a wait of the scheduler. A submitted trajectory that is still wanted gets its log-probabilities
once, also if the process crashes (law 6). `publish_model` publishes the weights of an evaluation, which has no
learner.
"""

import asyncio
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

import msgspec

from laminar_py.config.changes import resized
from laminar_py.engines.sglang.settings import KEY_ENV
from laminar_py.learner.packing.buffer import PackQueue
from laminar_py.learner.packing.packer import Packed, StepWeights
from laminar_py.records.codec import decode, encode
from laminar_py.records.columns import MODEL_COLUMNS, Source
from laminar_py.records.metrics import LearnerProgress, LearnerStarted, RankPosition
from laminar_py.records.proofs import NextToken
from laminar_py.records.trajectory import TrajectoryRef
from laminar_py.records.weights import Published
from laminar_py.runtime.cluster.backend import free_port, on_node
from laminar_py.runtime.cluster.calls import Scalar
from laminar_py.runtime.cluster.errors import NoAnswerError, PartCrashedError, RunFailedError
from laminar_py.runtime.cluster.part import Part, watched
from laminar_py.runtime.cluster.placement import NodeSlot
from laminar_py.runtime.workers.hangs import HangWatch
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import WATCH_S, Keeper
from laminar_py.runtime.workers.relays import Relays
from laminar_py.runtime.workers.segments import RunSegments
from laminar_py.runtime.workers.shared import RankGpus
from laminar_py.runtime.workers.specs import (
    FetchRequest,
    FrozenAnswer,
    FrozenRequest,
    FrozenSpec,
    LearnerSpec,
    StepOutcome,
    StepRequest,
    WeightsSpec,
)

T = TypeVar("T")
START_S = 600.0  # a rank does not answer while it imports and loads
PROGRESS_S = 1.0
PORT_S = 60.0  # for the first rank's host to find a port, in a process that starts for it
COLLECTIVE_CALLS = ("step", "publish")  # in which ranks wait for each other
MEMORY_ADVICE = {
    Source.REFERENCE: "lower packer.max_tokens, or set algorithm.reference_pass=learner",
    Source.TEACHER: "lower packer.max_tokens, or name the address of a server in algorithm.teacher",
}
PUBLISH_S = 3600.0  # a large model on a slow disk


class LearnerKeeper(Keeper):
    """Calls all learner ranks together; the trainer decides when to replace them. `show` gets start progress."""

    actor_class = "laminar_py.runtime.workers.processes.learner:LearnerActor"
    concurrency = 6  # a step, a version, a checkpoint, and a call for the progress beside each
    timeout_s = START_S
    memory_advice = (
        "lower packer.max_tokens, set learner.recompute=all or all_offloaded, or raise learner.world_size"
    )

    def __init__(
        self, incarnation: Incarnation, *, relays: Relays, show: Callable[[LearnerProgress], None]
    ) -> None:
        super().__init__(incarnation, *_rank_names(incarnation.config.learner.world_size))
        self._run_dir = incarnation.run.path
        self._relays = relays
        self._show = show
        self._starts = 0
        self._hangs = HangWatch(incarnation.config.learner.world_size)
        self._started: LearnerStarted | None = None
        self.gpus: tuple[RankGpus, ...] = ()  # [ranks] of the processes that started last
        self._checkpoint: Path | None = None
        self.requested: int | None = None  # number of ranks that the user wants
        self.resizing = asyncio.Event()  # set when there is room for them; the trainer then calls `resize`
        self._is_resizing = False

    async def start(self, checkpoint: Path | None) -> LearnerStarted:
        """Load, warm-start or restore the model on all ranks; return its sizes. Raises PartCrashedError."""
        self._checkpoint = checkpoint
        await self.begin()
        assert self._started is not None, "a started learner has sizes"
        return self._started

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self._names)

    def request(self, ranks: int) -> bool:
        """Request so many ranks in place of an earlier request; return False, without one, if it has as many."""
        self.drop_request()
        if ranks == self.num_ranks and not self._is_resizing:
            return False
        self.requested = ranks
        return True

    def drop_request(self) -> None:
        """Forget the number of ranks that the user wants."""
        self.requested = None
        self.resizing.clear()

    async def resize(self) -> bool:
        """End all ranks and plan for those requested, which `start` starts; False, without a change, for no room.

        Raises `RunFailedError` if the nodes have no room for the run.
        """
        ranks = self.requested
        assert ranks is not None, "a request sets `resizing`"
        self.resizing.clear()
        self._is_resizing = True
        try:
            if ranks > self.num_ranks and not await self._placement.scale_learner(ranks):
                return False
            self.kill()
            self.parts, self.is_up = (), False
            if ranks < self.num_ranks:
                await self._placement.scale_learner(ranks)
            self._config, self._names = resized(self._config, ranks), _rank_names(ranks)
            if self.requested == ranks:  # the user has not asked again meanwhile
                self.requested = None
            return True
        finally:
            self._is_resizing = False

    def places(self) -> Sequence[NodeSlot | None]:
        """Return the places of all ranks."""
        return self._placement.plan.learner

    async def start_parts(self, parts: Sequence[Part]) -> None:
        """Start all ranks together, from the checkpoint if there is one; they meet at a new rendezvous."""
        await self._relays.root_up()
        rendezvous = await self._rendezvous(parts)
        self._hangs = HangWatch(len(parts))
        ranks_on = Counter(part.place.node for part in parts)
        copy = [part.place.node for part in parts[: self._config.learner.shard_size]]
        writers = len(list(takewhile(lambda node: node == copy[0], copy)))
        requests = [
            encode(
                LearnerSpec(
                    config=self._config.model_dump_json(),
                    run_dir=str(self._run_dir),
                    rank=rank,
                    rendezvous=rendezvous,
                    store=str(self._relays.store(0)),
                    chunk_bytes=self._relays.chunk_bytes,
                    ranks_here=ranks_on[part.place.node],
                    writers=writers,
                    probes=list(self._incarnation.inputs.probes),
                    checkpoint=None if self._checkpoint is None else str(self._checkpoint),
                )
            )
            for rank, part in enumerate(parts)
        ]
        answers = await self._call_all("start", requests)
        started = [decode(LearnerStarted, answer) for answer in answers if isinstance(answer, bytes)]
        self.gpus = tuple(RankGpus(part.place.node, rank.gpus) for part, rank in zip(parts, started, strict=True))
        fault = _first_fault([answer.fault for answer in started])
        self._started = msgspec.structs.replace(started[0], fault=fault)

    async def _rendezvous(self, parts: Sequence[Part]) -> str:
        """Return the ranks' rendezvous: a new file if they are on one node, else a port on rank 0's node."""
        hosts = [part.place.node for part in parts]
        if len(set(hosts)) == 1:
            self._starts += 1
            path = self._run_dir.resolve() / f"rendezvous-{self._starts}"
            path.unlink(missing_ok=True)  # left by ranks that were killed before a resume
            return str(path)
        home = hosts[0]
        assert home is not None, "a learner of several ranks has places"
        ip = self._placement.ip(home)
        try:
            async with asyncio.timeout(PORT_S):
                port = decode(int, await on_node(home, free_port, ip))
        except (NoAnswerError, TimeoutError) as error:
            reason = str(error) or f"no answer in {PORT_S:g} s"
            raise PartCrashedError(parts[0].name, f"its node {ip} gives no free port: {reason}") from error
        return f"tcp://{ip}:{port}"

    async def fetch(self, packed: Packed[TrajectoryRef]) -> dict[str, str]:
        """Have ranks read the next step's tokens; return reasons by lost trajectory. Raises PartCrashedError."""
        requests = []
        for bundles in packed.bundles:
            request = await asyncio.to_thread(encode, FetchRequest(bundles))  # megabytes: off the loop
            requests += [request] * self._config.learner.context_parallel
        lost: dict[str, str] = {}
        for answer in await self._call_all("fetch", requests):
            assert isinstance(answer, bytes), "fetch answers bytes"
            lost |= decode(dict[str, str], answer)
        return lost

    async def step(self, terms: StepWeights, *, version: int | None) -> StepOutcome:
        """Step on the fetched trajectories; publish the weights as `version`, if set. Raises PartCrashedError."""
        request = encode(StepRequest(terms, version))
        return await self._call_first(StepOutcome, "step", [request] * len(self.parts))

    async def publish(self, version: int) -> None:
        """Publish the present weights as `version`. Raises PartCrashedError."""
        await self._call_all("publish", [version] * len(self.parts))

    async def completed(self, version: int) -> Published:
        """Wait until a published version is complete, and return it. Raises PartCrashedError."""
        return await self._call_first(Published, "completed", [version])

    async def next_tokens(self, version: int) -> list[NextToken]:
        """Return the learner's distribution after each probe under `version`. Raises PartCrashedError."""
        return await self._call_first(list[NextToken], "next_tokens", [version])

    async def save(self, path: Path) -> None:
        """Begin a checkpoint in `path`; return when the state is copied. Raises PartCrashedError."""
        await self._call_all("save", [str(path)] * len(self.parts))

    async def saved(self) -> str:
        """Wait until the newest checkpoint is complete on disk and read back; return its fault, or "".

        Raises PartCrashedError.
        """
        return _first_fault(await self._call_all("saved", [None] * len(self.parts)))

    async def _watch_start(self) -> None:
        """Ask starting ranks for progress until cancelled, and show rank 0's. Raises PartCrashedError."""
        while True:
            await asyncio.sleep(PROGRESS_S)
            for rank, part in enumerate(self.parts):
                progress = await part.call_for(LearnerProgress, "progress", timeout_s=START_S)
                if rank == 0:
                    self._show(progress)

    async def _watch_positions(self, *, judge: bool) -> None:
        """Ask ranks for their positions until cancelled.

        Raises PartCrashedError if a rank does not answer, or, with `judge`, if a rank keeps others waiting.
        """
        clock, limit_s = asyncio.get_running_loop().time, self._config.supervisor.heartbeat_timeout_s
        if judge:
            self._hangs.restart(clock())
        pause_s = 0.0 if judge else WATCH_S  # at once, since a message about a crash needs a position
        while True:
            await asyncio.sleep(pause_s)
            pause_s = WATCH_S
            for rank, part in enumerate(self.parts):
                position = await part.call_for(RankPosition, "position", timeout_s=limit_s)
                self._hangs.note(rank, position, now=clock())
            hung = self._hangs.find_hung(clock()) if judge else None
            if hung is not None:
                raise PartCrashedError(self.parts[hung[0]].name, hung[1])

    async def _call_first(self, kind: type[T], method: str, arguments: Sequence[Scalar]) -> T:
        """Call the ranks as `_call_all` does, and return the decoded answer of rank 0."""
        answer = (await self._call_all(method, arguments))[0]
        assert isinstance(answer, bytes), f"{method} answers bytes"
        return decode(kind, answer)

    async def _call_all(self, method: str, arguments: Sequence[Scalar]) -> list[object]:
        """Call rank i with argument i, None for no argument; with one argument only rank 0.

        The call has no timeout, since a step may take long; `_watch_positions` finds a rank that hangs. A crash
        of one rank kills all ranks.
        """
        assert len(arguments) in (1, len(self.parts)), f"{len(arguments)} arguments for {len(self.parts)} ranks"

        async def call_ranks() -> list[object]:
            named = [() if argument is None else (argument,) for argument in arguments]
            pairs = zip(self.parts, named, strict=False)
            return await asyncio.gather(*(part.call(method, *given, timeout_s=math.inf) for part, given in pairs))

        if method == "start":
            watch = self._watch_start()
        else:
            watch = self._watch_positions(judge=method in COLLECTIVE_CALLS)
        try:
            return await watched(call_ranks(), watch)
        except PartCrashedError as error:
            self.kill()  # the other ranks wait in a collective that never completes
            raise self._located(error) from error

    def _located(self, error: PartCrashedError) -> PartCrashedError:
        """Return the crash of a rank with its host and its last activity."""
        rank, part = next((rank, part) for rank, part in enumerate(self.parts) if part.name == error.part)
        activity = self._hangs.last_activity(rank)
        if not activity or part.place.node is None:
            return error
        where = f"rank {rank} on {self._placement.ip(part.place.node)}"
        return PartCrashedError(error.part, f"{error.reason}; {where} was last seen in: {activity}")


def _rank_names(ranks: int) -> tuple[str, ...]:
    """Return the names of the ranks' processes."""
    return tuple(f"learner-{rank}" for rank in range(ranks))


def _first_fault(faults: Sequence[object]) -> str:
    """Return the first fault that a rank found, with the rank's number if there are several; "" without any."""
    found = [(rank, fault) for rank, fault in enumerate(faults) if fault]
    if not found or len(faults) == 1:
        return "".join(str(fault) for _, fault in found)
    return f"{found[0][1]} (rank {found[0][0]}; {len(found)} of {len(faults)} ranks found a fault)"


# ---- frozen models


class FrozenStage(Keeper):
    """Runs a frozen model on packed batches of submitted trajectories, one batch after the other.

    `source` says which: `FrozenStage(incarnation, Source.TEACHER, segments=segments)` is in process `teacher-0`.
    """

    actor_class = "laminar_py.runtime.workers.processes.learner:FrozenActor"
    timeout_s = START_S

    def __init__(self, incarnation: Incarnation, source: Source, *, segments: RunSegments) -> None:
        super().__init__(incarnation, f"{source}-0")
        self.source, self.column = source, MODEL_COLUMNS[source]
        self.memory_advice = MEMORY_ADVICE[source]
        self._segments = segments
        self.check: Callable[[str], None] = lambda fingerprint: None  # for alarms
        self._queue = PackQueue(max_tokens=incarnation.config.packer.max_tokens)
        self._starts = 0

    def places(self) -> Sequence[NodeSlot | None]:
        """Return the model's place in the plan."""
        sources = [source for source, _ in self._placement.needs.stages]
        return [self._placement.plan.stages[sources.index(self.source)]]

    def submit_trajectory(self, trajectory: TrajectoryRef) -> None:
        """Queue a finished trajectory for the model."""
        self._queue.add_trajectory(trajectory)

    async def next_answer(self, *, wanted: Callable[[str], bool]) -> FrozenAnswer:
        """Run the model on a packed batch of `wanted` trajectories, once there are some; return its answer.

        A new process runs a batch again after a crash. Raises RunFailedError.
        """
        request = FrozenRequest(list(await self._queue.next_batch(wanted=wanted)))

        async def call(parts: Sequence[Part]) -> FrozenAnswer:
            (part,) = parts
            answer = part.call_for(FrozenAnswer, "logprobs", request, timeout_s=math.inf)
            return await watched(answer, self._check(part))

        answer = await self.call_with_restarts(call)
        self._incarnation.stats.add_reference_time(answer.elapsed_s)
        self.check(answer.fingerprint)
        return answer

    async def start_parts(self, parts: Sequence[Part]) -> None:
        """Load the model in its process, with a new rendezvous file and a new label."""
        self._starts += 1
        run = self._incarnation.run.path
        rendezvous = run.resolve() / f"rendezvous-{parts[0].name}-{self._starts}"
        rendezvous.unlink(missing_ok=True)  # left by a process that was killed before a resume
        spec = FrozenSpec(
            config=self._config.model_dump_json(),
            run_dir=str(run),
            rendezvous=str(rendezvous),
            label=self._segments.new_label(parts[0].name),
            source=self.source,
            secret=os.environ.get(KEY_ENV) if self._config.algorithm.teacher_url else None,
        )
        await parts[0].call("start", spec)

    async def _check(self, part: Part) -> None:
        """Call the process every `WATCH_S` until cancelled. Raises PartCrashedError when it hangs."""
        while True:
            await asyncio.sleep(WATCH_S)
            await part.call("pid", timeout_s=self._config.supervisor.heartbeat_timeout_s)


# ---- in place of a learner, where weights are evaluated


async def publish_model(incarnation: Incarnation, relays: Relays) -> Published:
    """Publish the model that the config names as version 0, in a process that ends then. Raises RunFailedError."""
    await relays.root_up()
    spec = WeightsSpec(
        config=incarnation.config.model_dump_json(),
        run_dir=str(incarnation.run.path),
        store=str(relays.store(0)),
        chunk_bytes=relays.chunk_bytes,
    )
    actor = "laminar_py.runtime.workers.processes.learner:WeightsActor"
    place = incarnation.placement.plan.learner[0]
    part = Part("weights", actor, concurrency=1, timeout_s=PUBLISH_S, place=place)
    try:
        return await part.call_for(Published, "publish", spec)
    except PartCrashedError as error:
        raise RunFailedError(f"the weights are not published: {error.reason}; see logs/weights.log") from error
    finally:
        part.kill()
