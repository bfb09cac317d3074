"""The reference stage: the queue before the reference model, its process, and the restart of the process.

Owned by the controller. The scheduler submits finished trajectories, and the loop `refer` takes log-probabilities
in; neither waits for the other. Each submitted trajectory that is still wanted gets its log-probabilities once,
however often the process dies (law 6).
"""

import asyncio
import math
from collections.abc import Callable, Sequence

from laminar_py.learner.packing.queue import PackQueue
from laminar_py.records.finished import FinishedTrajectory
from laminar_py.runtime.cluster.part import Part, watched
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import Keeper, PartSpec
from laminar_py.runtime.workers.payload import PayloadHosts
from laminar_py.runtime.workers.specs import ReferenceAnswer, ReferenceRequest, ReferenceSpec

NAME = "reference-0"
START_S = 600.0  # to import and load
WATCH_S = 5.0


class ReferenceStage:
    """Runs packed passes over submitted trajectories, one after the other."""

    def __init__(self, incarnation: Incarnation, *, payload: PayloadHosts) -> None:
        self._payload = payload
        self._incarnation = incarnation
        self._config = incarnation.config
        self._queue = PackQueue(max_tokens=incarnation.config.packer.max_tokens)
        self._starts = 0
        spec = PartSpec(
            names=[NAME],
            actor="laminar_py.runtime.workers.processes.learner:ReferenceActor",
            concurrency=2,
            timeout_s=START_S,
            places=lambda: [incarnation.placement.plan.reference],
            start=self._start,
            spares_memory="lower packer.max_tokens, or set algorithm.reference_pass=learner",
        )
        self._keeper = Keeper(spec, incarnation)

    def submit_trajectory(self, trajectory: FinishedTrajectory) -> None:
        """Queue a finished trajectory for the reference model."""
        self._queue.put(trajectory)

    def spawn(self) -> None:
        """Start the process, which holds its GPU from now on; `start` loads the model in it."""
        self._keeper.spawn()

    async def start(self) -> None:
        """Load the model. A warm start must be finished by now, since its result may be the reference.

        Raises ConfigError if the model cannot serve, RunFailedError if its process dies too often.
        """
        await self._keeper.bring_up()

    async def next_answer(self, *, wanted: Callable[[str], bool]) -> ReferenceAnswer:
        """Return log-probabilities of the next queued trajectories that are `wanted`. Raises RunFailedError."""
        return await self._ask(await self._queue.take(wanted=wanted))

    async def _ask(self, bundle: Sequence[FinishedTrajectory]) -> ReferenceAnswer:
        """Run one packed pass, again in a new process if one dies over it."""

        async def call(parts: Sequence[Part]) -> ReferenceAnswer:
            (part,) = parts
            refs = (ref for one in bundle for ref in one.refs)
            request = ReferenceRequest(list(bundle), self._payload.stores_for(refs, part.place.node))
            answer = part.call_for(ReferenceAnswer, "logprobs", request, timeout_s=math.inf)
            return await watched(answer, self._watch(part))

        answer = await self._keeper.call_with_restarts(call)
        self._incarnation.stats.referred(answer.elapsed_s)
        return answer

    async def _start(self, parts: Sequence[Part]) -> None:
        self._starts += 1
        run = self._incarnation.run.path
        rendezvous = run.resolve() / f"rendezvous-{NAME}-{self._starts}"
        rendezvous.unlink(missing_ok=True)  # left by a process that was killed before a resume
        config = self._config.model_dump_json()
        spec = ReferenceSpec(
            config=config,
            run_dir=str(run),
            rendezvous=str(rendezvous),
            label=await self._payload.new_label(NAME, parts[0].place.node),
            store_key=self._payload.key,
        )
        await parts[0].call("start", spec)

    async def _watch(self, part: Part) -> None:
        """Call the process now and then during a pass. Raises PartDiedError when it hangs."""
        while True:
            await asyncio.sleep(WATCH_S)
            await part.call("pid", timeout_s=self._config.supervisor.heartbeat_timeout_s)
