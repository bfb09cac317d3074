"""The learner's ranks as one: started, stepped, saved and revived together. Owned by the controller."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from laminar_py.learner.packing.packer import Packed, StepTerms
from laminar_py.records.codec import decode, encode
from laminar_py.records.metrics import LearnerProgress
from laminar_py.records.trajectory import FinishedTrajectory
from laminar_py.records.weights import Published
from laminar_py.runtime.cluster.backend import free_port, on_node
from laminar_py.runtime.cluster.calls import Scalar
from laminar_py.runtime.cluster.errors import PartDiedError, ProcessLostError
from laminar_py.runtime.cluster.part import Part, watched
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import Keeper, PartSpec
from laminar_py.runtime.workers.payload import PayloadHosts
from laminar_py.runtime.workers.processes.learner import LearnerActor
from laminar_py.runtime.workers.relays import Relays
from laminar_py.runtime.workers.specs import FetchRequest, LearnerSpec, LearnerStarted, StepOutcome, StepRequest

T = TypeVar("T")
START_S = 600.0  # a rank that imports and loads answers nothing meanwhile
PROGRESS_S = 1.0
PORT_S = 60.0  # for the first rank's host to name a port: a process starts there for it
WATCH_S = 5.0
CALLS = 6  # at once: a step, a version and a checkpoint being completed, and a look at the progress beside each


class LearnerLink:
    """`world_size` learner processes that make every call together; the trainer says when they are replaced."""

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        relays: Relays,
        payload: PayloadHosts,
        show: Callable[[LearnerProgress], None],
    ) -> None:
        self._payload = payload
        self._config = incarnation.config
        self._run_dir = incarnation.run.path
        self._relays = relays
        self._show = show
        self._placement = incarnation.placement
        self._starts = 0
        self._started: LearnerStarted | None = None
        self._checkpoint: Path | None = None
        spec = PartSpec(
            names=[f"learner-{rank}" for rank in range(incarnation.config.learner.world_size)],
            actor=LearnerActor,
            concurrency=CALLS,
            timeout_s=START_S,
            places=lambda: incarnation.placement.plan.learner,
            start=self._start,
            spares_memory="lower packer.max_tokens, set learner.recompute=all, or raise learner.world_size",
        )
        self._keeper = Keeper(spec, incarnation)

    def spawn(self) -> None:
        """Start the processes; `start` starts what runs in them."""
        self._keeper.spawn()

    async def start(self, checkpoint: Path | None) -> LearnerStarted:
        """Load, warm-start or restore the model on all ranks. Raises PartDiedError."""
        self._checkpoint = checkpoint
        await self._keeper.begin()
        assert self._started is not None, "a learner that is up has told its sizes"
        return self._started

    async def replace(self, death: PartDiedError) -> None:
        """End all ranks and count that; others are there at the next `start`. Raises RunFailedError."""
        await self._keeper.replace(death)

    def kill(self) -> None:
        """End all ranks."""
        self._keeper.kill()

    async def _start(self, parts: Sequence[Part]) -> None:
        await self._relays.root_up()
        rendezvous = await self._rendezvous(parts)
        ranks_on = Counter(part.place.node for part in parts)
        labels = [await self._payload.label(part.name, part.place.node) for part in parts]
        requests = [
            encode(
                LearnerSpec(
                    config=self._config.model_dump_json(),
                    run_dir=str(self._run_dir),
                    label=labels[rank],
                    store_key=self._payload.key,
                    rank=rank,
                    rendezvous=rendezvous,
                    store=str(self._relays.store(0)),
                    chunk_bytes=self._relays.chunk_bytes,
                    ranks_here=ranks_on[part.place.node],
                    checkpoint=None if self._checkpoint is None else str(self._checkpoint),
                )
            )
            for rank, part in enumerate(parts)
        ]
        self._started = await self._ask(LearnerStarted, "start", requests)

    async def _rendezvous(self, parts: Sequence[Part]) -> str:
        """Meeting point of the ranks: a new file if they are on one node, else a port of rank 0's."""
        hosts = [part.place.node for part in parts]
        if len(set(hosts)) == 1:
            self._starts += 1
            path = self._run_dir.resolve() / f"rendezvous-{self._starts}"
            path.unlink(missing_ok=True)  # of ranks that were killed before the run was resumed
            return str(path)
        home = hosts[0]
        assert home is not None, "a learner of several ranks has places"
        ip = self._placement.ip(home)
        try:
            async with asyncio.timeout(PORT_S):
                port = decode(int, await on_node(home, free_port, ip))
        except (ProcessLostError, TimeoutError) as error:
            reason = str(error) or f"nothing in {PORT_S:g} s"
            raise PartDiedError(parts[0].name, f"its node {ip} does not answer: {reason}") from error
        return f"tcp://{ip}:{port}"

    async def fetch(self, packed: Packed[FinishedTrajectory]) -> dict[str, str]:
        """Have each rank read the tokens of its next step; what is lost, by trajectory. Raises PartDiedError."""
        requests = []
        for part, bundles in zip(self._keeper.parts, packed.bundles, strict=True):
            refs = (ref for bundle in bundles for one in bundle for ref in one.refs)
            request = FetchRequest(bundles, self._payload.stores_for(refs, part.place.node))
            requests.append(await asyncio.to_thread(encode, request))  # megabytes: off the loop
        lost: dict[str, str] = {}
        for answer in await self._together("fetch", requests):
            assert isinstance(answer, bytes), "fetch answers bytes"
            lost |= decode(dict[str, str], answer)
        return lost

    async def step(self, terms: StepTerms, *, version: int | None) -> StepOutcome:
        """Take an optimizer step on what was fetched; publish it as `version`, if set. Raises PartDiedError."""
        request = encode(StepRequest(terms, version))
        return await self._ask(StepOutcome, "step", [request] * len(self._keeper.parts))

    async def publish(self, version: int) -> None:
        """Publish the weights as they are. Raises PartDiedError."""
        await self._together("publish", [version] * len(self._keeper.parts))

    async def completed(self, version: int) -> Published:
        """A version that is being published, once it is complete. Raises PartDiedError."""
        return await self._ask(Published, "completed", [version])

    async def save(self, path: Path) -> None:
        """Begin a checkpoint in `path`; returns when the state is copied. Raises PartDiedError."""
        await self._together("save", [str(path)] * len(self._keeper.parts))

    async def saved(self) -> None:
        """Until the checkpoint that was begun last is complete on disk. Raises PartDiedError."""
        await self._together("saved", [None] * len(self._keeper.parts))

    async def _watch(self, *, starting: bool) -> None:
        """Ask every rank for its progress beside a call; raises PartDiedError when one hangs."""
        while True:
            await asyncio.sleep(PROGRESS_S if starting else WATCH_S)
            for rank, part in enumerate(self._keeper.parts):
                limit = START_S if starting else self._config.supervisor.heartbeat_timeout_s
                progress = await part.ask(LearnerProgress, "progress", timeout_s=limit)
                if starting and rank == 0:
                    self._show(progress)

    async def _ask(self, kind: type[T], method: str, arguments: Sequence[Scalar]) -> T:
        """Answer of the first rank to a call on all."""
        answer = (await self._together(method, arguments))[0]
        assert isinstance(answer, bytes), f"{method} answers bytes"
        return decode(kind, answer)

    async def _together(self, method: str, arguments: Sequence[Scalar]) -> list[object]:
        """Make a call on every rank, or on the first of them if there is one argument.

        Without a limit of its own: a rank that works may take its time.
        """
        parts = self._keeper.parts
        assert len(arguments) in (1, len(parts)), f"{len(arguments)} arguments for {len(parts)} ranks"
        try:
            return await watched(self._call_ranks(method, arguments), self._watch(starting=method == "start"))
        except PartDiedError:
            self.kill()  # the other ranks wait in a collective that will never complete
            raise

    async def _call_ranks(self, method: str, arguments: Sequence[Scalar]) -> list[object]:
        calls = [
            part.call(method, *([] if argument is None else [argument]), timeout_s=math.inf)
            for part, argument in zip(self._keeper.parts, arguments, strict=False)
        ]
        return await asyncio.gather(*calls)
