"""The learner's ranks as one: started, stepped, saved and revived together. Owned by the controller."""

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from ray.exceptions import RayError

from laminar_py.cluster.errors import PartDiedError
from laminar_py.cluster.part import Part, watched
from laminar_py.cluster.placement import Placement
from laminar_py.cluster.ray_cluster import free_port, on_node
from laminar_py.config.run import RunConfig
from laminar_py.packing.packer import Packed
from laminar_py.records.codec import decode, encode
from laminar_py.records.metrics import LearnerProgress
from laminar_py.records.weights import Published
from laminar_py.workers.processes.actors import LearnerActor
from laminar_py.workers.relays import Relays
from laminar_py.workers.specs import LearnerSpec, LearnerStarted, StepOutcome, StepRequest

START_S = 600.0  # a rank that imports and loads answers nothing meanwhile
PROGRESS_S = 1.0
WATCH_S = 5.0
CALLS = 6  # at once: a step, a version and a checkpoint being completed, and a look at the progress beside each


class LearnerLink:
    """`world_size` learner processes that make every call together."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_dir: Path,
        relays: Relays,
        show: Callable[[LearnerProgress], None],
        placement: Placement,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._relays = relays
        self._show = show
        self._placement = placement
        self._parts: list[Part] = []
        self._starts = 0

    def spawn(self) -> None:
        """Start the processes where there is room now; `start` starts what runs in them."""
        self._placement.refresh()
        self._parts = [
            Part(f"learner-{rank}", LearnerActor, concurrency=CALLS, timeout_s=START_S, place=place)
            for rank, place in enumerate(self._placement.plan.learner)
        ]

    async def start(self, checkpoint: Path | None) -> LearnerStarted:
        """Load, warm-start or restore the model on all ranks. Raises PartDiedError."""
        relay = await self._relays.root_up()
        rendezvous = await self._rendezvous()
        requests = [
            encode(
                LearnerSpec(
                    config=self._config.model_dump_json(),
                    run_dir=str(self._run_dir),
                    rank=rank,
                    rendezvous=rendezvous,
                    store=str(self._relays.store(0)),
                    relay=relay,
                    chunk_bytes=self._relays.chunk_bytes,
                    public_key=self._relays.keys.public,
                    secret_key=self._relays.keys.secret,
                    checkpoint=None if checkpoint is None else str(checkpoint),
                )
            )
            for rank in range(len(self._parts))
        ]
        return decode(LearnerStarted, (await self._all("start", requests))[0])

    async def _rendezvous(self) -> str:
        """Where the ranks meet: at a new file if they are on one node, else at a port of rank 0's."""
        hosts = [part.place.node for part in self._parts]
        if len(set(hosts)) == 1:
            self._starts += 1
            path = self._run_dir.resolve() / f"rendezvous-{self._starts}"
            path.unlink(missing_ok=True)  # of ranks that were killed before the run was resumed
            return str(path)
        home = hosts[0]
        assert home is not None, "a learner of several ranks has places"
        ip = self._placement.ip(home)
        try:
            port = decode(int, await on_node(home, free_port, ip))
        except RayError as error:
            raise PartDiedError(self._parts[0].name, f"its node {ip} does not answer: {error}") from error
        return f"tcp://{ip}:{port}"

    async def step(self, packed: Packed, *, version: int | None) -> StepOutcome:
        """One optimizer step; published as `version` if that is set. Raises PartDiedError."""
        # Megabytes for each rank: off the loop, where reports and scores go on coming in.
        steps = [StepRequest(bundles, packed.terms, version) for bundles in packed.bundles]
        requests = [await asyncio.to_thread(encode, step) for step in steps]
        return decode(StepOutcome, (await self._all("step", requests))[0])

    async def publish(self, version: int) -> None:
        """Publish the weights as they are. Raises PartDiedError."""
        await self._together("publish", [version] * len(self._parts))

    async def sealed(self, version: int) -> Published:
        """A version that is being published, once it is complete. Raises PartDiedError."""
        (answer,) = await self._together("sealed", [version])
        assert isinstance(answer, bytes)
        return decode(Published, answer)

    async def save(self, path: Path) -> None:
        """Begin a checkpoint in `path`; returns when the state is copied. Raises PartDiedError."""
        await self._together("save", [str(path)] * len(self._parts))

    async def saved(self) -> None:
        """Until the checkpoint that was begun last is complete on disk. Raises PartDiedError."""
        await self._together("saved", [None] * len(self._parts))

    async def pids(self) -> dict[str, int]:
        """Process id of each rank by name. Raises PartDiedError."""
        answers = await self._together("pid", [None] * len(self._parts))
        return {part.name: pid for part, pid in zip(self._parts, answers, strict=True) if isinstance(pid, int)}

    def kill(self) -> None:
        """End all ranks."""
        _kill(self._parts)

    async def _watch(self, *, starting: bool) -> None:
        """Ask every rank for its progress beside a call; raises PartDiedError when one hangs."""
        while True:
            await asyncio.sleep(PROGRESS_S if starting else WATCH_S)
            for rank, part in enumerate(self._parts):
                limit = START_S if starting else self._config.supervisor.heartbeat_timeout_s
                answer = await part.call("progress", timeout_s=limit)
                assert isinstance(answer, bytes)
                if starting and rank == 0:
                    self._show(decode(LearnerProgress, answer))

    async def _all(self, method: str, arguments: Sequence[object]) -> list[bytes]:
        answers = await self._together(method, arguments)
        assert all(isinstance(answer, bytes) for answer in answers), f"{method} answers bytes"
        return answers  # type: ignore[return-value]

    async def _together(self, method: str, arguments: Sequence[object]) -> list[object]:
        """The same call on all ranks, or on the first of them if there are fewer arguments.

        No limit of its own: a rank that works may take its time.
        """
        parts = self._parts
        assert len(arguments) in (1, len(parts)), f"{len(arguments)} arguments for {len(parts)} ranks"
        try:
            return await watched(self._call_ranks(method, arguments), self._watch(starting=method == "start"))
        except PartDiedError:
            _kill(parts)  # the other ranks wait in a collective that will never complete
            raise

    async def _call_ranks(self, method: str, arguments: Sequence[object]) -> list[object]:
        calls = [
            part.call(method, *([] if argument is None else [argument]), timeout_s=math.inf)
            for part, argument in zip(self._parts, arguments, strict=False)
        ]
        return await asyncio.gather(*calls)


def _kill(parts: Sequence[Part]) -> None:
    for part in parts:
        part.kill()
