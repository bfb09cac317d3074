"""The reference stage: what waits for the reference model, the process that has it, and its revival.

Owned by the controller; the scheduler submits what is finished and gets log-probabilities back, and neither waits
for the other. Invariant: what was submitted and is still wanted is delivered once, however often the process dies
over it (law 6).
"""

import asyncio
import math
from collections.abc import Callable, Sequence

from laminar_py.learner.packing.buffer import PackQueue
from laminar_py.records.codec import encode
from laminar_py.records.trajectory import FinishedTrajectory
from laminar_py.runtime.cluster.part import Part, watched
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import Keeper, PartSpec
from laminar_py.runtime.workers.payload import PayloadHosts
from laminar_py.runtime.workers.processes.reference import ReferenceActor
from laminar_py.runtime.workers.specs import ReferenceAnswer, ReferenceRequest, ReferenceSpec

NAME = "reference-0"
START_S = 600.0  # while it imports and loads
WATCH_S = 5.0


class ReferenceStage:
    """Packed passes over what was submitted, one after the other."""

    def __init__(self, incarnation: Incarnation, *, payload: PayloadHosts) -> None:
        self._payload = payload
        self._incarnation = incarnation
        self._config = incarnation.config
        self._queue = PackQueue(max_tokens=incarnation.config.packer.max_tokens)
        self._starts = 0
        spec = PartSpec(
            names=[NAME],
            actor=ReferenceActor,
            concurrency=2,
            timeout_s=START_S,
            places=lambda: [incarnation.placement.plan.reference],
            start=self._start,
            spares_memory="lower packer.max_tokens, or set algorithm.reference_pass=learner",
        )
        self._keeper = Keeper(spec, incarnation)

    @classmethod
    def of(cls, incarnation: Incarnation, *, payload: PayloadHosts) -> "ReferenceStage | None":
        """The stage of a run, where its algorithm has one."""
        return cls(incarnation, payload=payload) if incarnation.config.algorithm.refers_in_stage else None

    def submit(self, trajectory: FinishedTrajectory) -> None:
        """Take it up as soon as the process is free."""
        self._queue.add_trajectory(trajectory)

    def spawn(self) -> None:
        """Start the process, which has its GPU from then on; `start` starts what runs in it."""
        self._keeper.spawn()

    async def start(self) -> None:
        """Bring the process up. What RL begins with must exist by now, since it may be the reference.

        Raises ConfigError if the model cannot serve, RunFailedError if its process dies too often.
        """
        await self._keeper.up()

    async def next_answer(self, *, wanted: Callable[[str], bool]) -> ReferenceAnswer:
        """Log-probabilities of the next trajectories that wait and are wanted. Raises RunFailedError."""
        return await self._ask(await self._queue.next_batch(wanted=wanted))

    async def _ask(self, bundle: Sequence[FinishedTrajectory]) -> ReferenceAnswer:
        """Answer on these, by a new process where one dies over them."""

        async def call(parts: Sequence[Part]) -> ReferenceAnswer:
            (part,) = parts
            refs = (ref for one in bundle for ref in one.refs)
            request = encode(ReferenceRequest(list(bundle), self._payload.stores_for(refs, part.place.node)))
            answer = part.ask(ReferenceAnswer, "logprobs", request, timeout_s=math.inf)
            return await watched(answer, self._watch(part))

        answer = await self._keeper.calling(call)
        self._incarnation.stats.referred(answer.elapsed_s)
        return answer

    async def _start(self, parts: Sequence[Part]) -> None:
        self._starts += 1
        run = self._incarnation.run.path
        rendezvous = run.resolve() / f"rendezvous-{NAME}-{self._starts}"
        rendezvous.unlink(missing_ok=True)  # of one that was killed before the run was resumed
        config = self._config.model_dump_json()
        spec = ReferenceSpec(
            config=config,
            run_dir=str(run),
            rendezvous=str(rendezvous),
            label=await self._payload.label(NAME, parts[0].place.node),
            store_key=self._payload.key,
        )
        await parts[0].call("start", encode(spec))

    async def _watch(self, part: Part) -> None:
        """Raise PartDiedError when it hangs over a pass."""
        while True:
            await asyncio.sleep(WATCH_S)
            await part.call("pid", timeout_s=self._config.supervisor.heartbeat_timeout_s)
