"""The reference stage: what waits for the reference model, the process that has it, and its revival.

Owned by the controller, whose flow submits what is finished and gets log-probabilities back; neither waits for the
stage. Invariant: what was submitted and is still wanted is delivered once, however often the process dies over it.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from laminar_py.cluster.errors import PartDiedError
from laminar_py.cluster.part import Part, watched
from laminar_py.cluster.placement import Placement
from laminar_py.config.run import RunConfig
from laminar_py.ledger.ledger import Ledger
from laminar_py.ledger.recordings import join_recordings
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.packing.queue import PackQueue
from laminar_py.records.codec import FloatArray, decode, encode
from laminar_py.records.recordings import Recording
from laminar_py.records.trajectory import Trajectory
from laminar_py.workers.processes.actors import ReferenceActor
from laminar_py.workers.specs import ReferenceAnswer, ReferenceSpec
from laminar_py.workers.supervisor import Supervisor

NAME = "reference-0"
START_S = 600.0  # while it imports and loads
WATCH_S = 5.0


class ReferenceStage:
    """`busy` is told how many seconds each pass took the process."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run: RunFolder,
        ledger: Ledger,
        supervisor: Supervisor,
        placement: Placement,
        busy: Callable[[float], None],
    ) -> None:
        self._config = config
        self._run = run
        self._ledger = ledger
        self._supervisor = supervisor
        self._placement = placement
        self._busy = busy
        self._queue = PackQueue(max_tokens=config.packer.max_tokens)
        self._part: Part | None = None
        self._starts = 0

    def submit(self, trajectory: Trajectory) -> None:
        """Take it up as soon as the process is free."""
        self._queue.put(trajectory)

    async def start(self) -> None:
        """Bring the process up. What RL begins with must exist by now, since it may be the reference.

        Raises ConfigError if the model cannot serve, RunFailedError if its process dies too often.
        """
        await self._up()

    async def run(
        self, *, wanted: Callable[[str], bool], deliver: Callable[[str, FloatArray], Awaitable[None]]
    ) -> None:
        """Serve until cancelled. Raises RunFailedError as `start` does."""
        while True:
            bundle = await self._queue.take(wanted=wanted)
            for trajectory, logprobs in zip(bundle, await self._logprobs(bundle), strict=True):
                await deliver(trajectory.id, logprobs)

    async def _logprobs(self, bundle: Sequence[Trajectory]) -> list[FloatArray]:
        """[L] of each, by a new process where one dies over them."""
        request = await asyncio.to_thread(encode, await self._with_masks(bundle))
        while True:
            part = await self._up()
            try:
                data = await watched(part.call("logprobs", request, timeout_s=math.inf), self._watch(part))
            except PartDiedError as error:
                self._died(error)
                continue
            assert isinstance(data, bytes)
            answer = decode(ReferenceAnswer, data)
            self._busy(answer.elapsed_s)
            return answer.logprobs

    async def _with_masks(self, bundle: Sequence[Trajectory]) -> list[Trajectory]:
        """With what they were drawn from, where that is recorded; a reference chooses its experts itself."""
        if Recording.SAMPLING_MASK not in self._config.rollout.record:
            return list(bundle)
        complete = await join_recordings(self._ledger, self._run.path, bundle)
        return [msgspec.structs.replace(complete.get(one.id, one), routed_experts=None) for one in bundle]

    # ---- the process

    async def _up(self) -> Part:
        """The process, ready; a new one if there is none, and again as often as it dies over its start."""
        while self._part is None:
            try:
                self._part = await self._start()
            except PartDiedError as error:
                self._died(error)
        return self._part

    async def _start(self) -> Part:
        self._starts += 1
        rendezvous = self._run.path.resolve() / f"rendezvous-{NAME}-{self._starts}"
        rendezvous.unlink(missing_ok=True)  # of one that was killed before the run was resumed
        place = self._placement.plan.reference
        assert place is not None, "a run with a reference stage has a place for it"
        part = Part(NAME, ReferenceActor, concurrency=2, timeout_s=START_S, place=place)
        spec = ReferenceSpec(self._config.model_dump_json(), str(self._run.path), str(rendezvous))
        pid = await part.call("start", encode(spec))
        assert isinstance(pid, int)
        self._supervisor.started(NAME, pid)
        return part

    def _died(self, error: PartDiedError) -> None:
        self._part = None
        self._supervisor.died(error)
        self._placement.refresh()

    async def _watch(self, part: Part) -> None:
        """Raises PartDiedError when it hangs over a pass."""
        while True:
            await asyncio.sleep(WATCH_S)
            await part.call("pid", timeout_s=self._config.supervisor.heartbeat_timeout_s)
