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
from laminar_py.cluster.placement import Place
from laminar_py.ledger.ledger import Ledger
from laminar_py.ledger.recordings import join_recordings
from laminar_py.packing.queue import PackQueue
from laminar_py.records.codec import FloatArray, decode, encode
from laminar_py.records.recordings import Recording
from laminar_py.records.trajectory import Trajectory
from laminar_py.workers.keeper import Keeper, Kept
from laminar_py.workers.processes.reference import ReferenceActor
from laminar_py.workers.site import Site
from laminar_py.workers.specs import ReferenceAnswer, ReferenceSpec

NAME = "reference-0"
START_S = 600.0  # while it imports and loads
WATCH_S = 5.0


class ReferenceStage:
    """`busy` is told how many seconds each pass took the process."""

    def __init__(self, site: Site, *, ledger: Ledger, busy: Callable[[float], None]) -> None:
        self._config = site.config
        self._run = site.run
        self._placement = site.placement
        self._ledger = ledger
        self._busy = busy
        self._queue = PackQueue(max_tokens=site.config.packer.max_tokens)
        self._starts = 0
        self._keeper = Keeper(
            Kept(
                names=[NAME],
                actor=ReferenceActor,
                concurrency=2,
                timeout_s=START_S,
                places=self._places,
                start=self._start,
            ),
            site,
        )

    def submit(self, trajectory: Trajectory) -> None:
        """Take it up as soon as the process is free."""
        self._queue.put(trajectory)

    async def start(self) -> None:
        """Bring the process up. What RL begins with must exist by now, since it may be the reference.

        Raises ConfigError if the model cannot serve, RunFailedError if its process dies too often.
        """
        await self._keeper.up()

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
            (part,) = await self._keeper.up()
            try:
                data = await watched(part.call("logprobs", request, timeout_s=math.inf), self._watch(part))
            except PartDiedError as error:
                await self._keeper.lost(error)
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

    def _places(self) -> list[Place] | None:
        place = self._placement.plan.reference
        return None if place is None else [place]

    async def _start(self, parts: Sequence[Part]) -> Sequence[int]:
        self._starts += 1
        rendezvous = self._run.path.resolve() / f"rendezvous-{NAME}-{self._starts}"
        rendezvous.unlink(missing_ok=True)  # of one that was killed before the run was resumed
        spec = ReferenceSpec(self._config.model_dump_json(), str(self._run.path), str(rendezvous))
        pid = await parts[0].call("start", encode(spec))
        assert isinstance(pid, int)
        return [pid]

    async def _watch(self, part: Part) -> None:
        """Raise PartDiedError when it hangs over a pass."""
        while True:
            await asyncio.sleep(WATCH_S)
            await part.call("pid", timeout_s=self._config.supervisor.heartbeat_timeout_s)
