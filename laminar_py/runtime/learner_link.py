"""The learner's ranks as one: started, stepped, saved and revived together. Owned by the controller."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from laminar_py.codec import decode, encode
from laminar_py.config import RunConfig
from laminar_py.runtime.actors import LearnerActor
from laminar_py.runtime.cluster import Part, PartDiedError
from laminar_py.runtime.relays import Relays
from laminar_py.runtime.specs import LearnerProgress, LearnerSpec, LearnerStarted, StepOutcome, StepRequest
from laminar_py.types import MicroBatch, Published

START_S = 3600.0
STEP_S = 3600.0
PROGRESS_S = 1.0


class LearnerLink:
    """`world_size` learner processes that make every call together."""

    def __init__(
        self, config: RunConfig, *, run_dir: Path, relays: Relays, show: Callable[[LearnerProgress], None]
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._relays = relays
        self._show = show
        self._parts: list[Part] = []
        self._starts = 0

    def spawn(self) -> None:
        """Start the processes; `start` starts what runs in them."""
        self._parts = [
            Part(f"learner-{rank}", LearnerActor, concurrency=2, timeout_s=STEP_S)
            for rank in range(self._config.learner.world_size)
        ]

    async def start(self, checkpoint: Path | None) -> LearnerStarted:
        """Load, warm-start or restore the model on all ranks. Raises PartDiedError."""
        self._starts += 1
        requests = [
            encode(
                LearnerSpec(
                    self._config.model_dump_json(),
                    str(self._run_dir),
                    rank,
                    str(self._run_dir.resolve() / f"rendezvous-{self._starts}"),
                    str(self._relays.store(0)),
                    self._relays.root,
                    self._relays.keys.public,
                    self._relays.keys.secret,
                    None if checkpoint is None else str(checkpoint),
                )
            )
            for rank in range(len(self._parts))
        ]
        watch = asyncio.create_task(self._watch_progress(), name="learner-progress")
        try:
            answers = await self._all("start", requests, timeout_s=START_S)
        finally:
            watch.cancel()
        return decode(LearnerStarted, answers[0])

    async def step(self, microbatches: Sequence[list[MicroBatch]], *, version: int | None) -> StepOutcome:
        """One optimizer step; published as `version` if that is set. Raises PartDiedError."""
        requests = [encode(StepRequest(batches, version)) for batches in microbatches]
        return decode(StepOutcome, (await self._all("step", requests))[0])

    async def publish(self, version: int) -> Published:
        """Publish the weights as they are. Raises PartDiedError."""
        answers = await self._all("publish", [version] * len(self._parts))
        return decode(Published, answers[0])

    async def save(self, path: Path) -> None:
        """Checkpoint into `path`. Raises PartDiedError."""
        await self._together("save", [str(path)] * len(self._parts))

    async def export(self, path: Path) -> None:
        """Write a Hugging Face folder. Raises PartDiedError."""
        await self._together("export", [str(path)] * len(self._parts))

    async def pids(self) -> dict[str, int]:
        """Process id of each rank by name. Raises PartDiedError."""
        answers = await self._together("pid", [None] * len(self._parts))
        return {part.name: pid for part, pid in zip(self._parts, answers, strict=True) if isinstance(pid, int)}

    def kill(self) -> None:
        """End all ranks."""
        for part in self._parts:
            part.kill()

    async def _watch_progress(self) -> None:
        while True:
            answer = await self._parts[0].call("progress")
            assert isinstance(answer, bytes)
            self._show(decode(LearnerProgress, answer))
            await asyncio.sleep(PROGRESS_S)

    async def _all(self, method: str, arguments: Sequence[object], *, timeout_s: float = STEP_S) -> list[bytes]:
        answers = await self._together(method, arguments, timeout_s=timeout_s)
        assert all(isinstance(answer, bytes) for answer in answers), f"{method} answers bytes"
        return answers  # type: ignore[return-value]

    async def _together(
        self, method: str, arguments: Sequence[object], *, timeout_s: float = STEP_S
    ) -> list[object]:
        calls = [
            asyncio.create_task(
                part.call(method, *([] if argument is None else [argument]), timeout_s=timeout_s),
                name=f"{part.name}-{method}",
            )
            for part, argument in zip(self._parts, arguments, strict=True)
        ]
        try:
            return await asyncio.gather(*calls)
        except PartDiedError:
            self.kill()  # the other ranks wait in a collective that will never complete
            for call in calls:
                call.cancel()
            raise
