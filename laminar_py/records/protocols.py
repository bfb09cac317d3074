"""Protocols between the parts; each has at least two implementations (the simulator's and tests' count)."""

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from laminar_py.records.engine import Delta, EngineStatus, GenerateRequest, PauseMode
from laminar_py.records.environment import EnvironmentTurn, ModelTurn, TurnPart
from laminar_py.records.scoring import Score, Unfinished, Unscored


class Clock(Protocol):
    """Source of time, so that the simulator runs the same policies on a virtual one."""

    def now(self) -> float:
        """Monotonic seconds of this host; only differences mean anything."""
        ...


class EngineLostError(Exception):
    """The engine is gone, hangs or answers nonsense; the message says which, in one line.

    `__cause__` is what the engine's own code raised, if that ended it; a mistake there ends the run.
    """


class StoreFullError(EngineLostError):
    """A folder of segments that cannot be written: the replica is of no use there, and others are."""


class RefusedError(ValueError):
    """A request that can never be served, or weights that do not fit; the message says why, the engine goes on."""


class InferenceEngine(Protocol):
    """Continuous-batching engine. `tests/engines/engine_conformance.py` is its definition.

    Every method raises `EngineLostError` once the engine is of no use any more.
    """

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """New tokens as they come; the last delta has a finish reason.

        `RefusedError` if it can never be served, `ValueError` if its rid is in flight.
        """
        ...

    async def abort(self, rid: str) -> None:
        """End that stream; everything generated so far is delivered with finish reason ABORT."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating, and do with running requests as `mode` says."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def load_weights(self, path: Path, version: int) -> None:
        """Serve the safetensors in `path` as `version`, from the next token on.

        `RefusedError` if the files do not fit; `RuntimeError` while requests run unpaused, `ValueError` if the
        version goes back.
        """
        ...

    async def checksum(self) -> str:
        """A hash over the tensors that the engine serves; equal for equal weights and layout."""
        ...

    async def watch(self) -> None:
        """Runs until cancelled; raises `EngineLostError` when the engine is lost."""
        ...

    def status(self) -> EngineStatus:
        """Requests, KV cache and version: at this moment, or as last heard."""
        ...


@runtime_checkable
class PushEngine(InferenceEngine, Protocol):
    """Engine of this event loop that tells of a stream, so that nobody needs a task to read it."""

    def follow(self, request: GenerateRequest, hear: Callable[[Delta | EngineLostError], None]) -> None:
        """`generate`, but that `hear` is told of each delta, or of the engine's loss in place of the last.

        Raises what `generate` raises before the first. `hear` raises nothing, and is called after this returns.
        """
        ...


class Environments(Protocol):
    """Environments of trajectories, in whatever processes they run."""

    async def answer(self, turn: ModelTurn) -> EnvironmentTurn:
        """Have the environment of a trajectory take a turn, beginning it where nothing was said yet.

        A turn that was answered before has the same answer again, and is not taken twice.
        """
        ...

    def hear(self, parts: Sequence[TurnPart]) -> None:
        """Tell environments that listen what is sampled, and wait for none of them.

        One that is not told hears the whole turn in the end.
        """
        ...

    async def forget(self, trajectory_id: str) -> None:
        """Let go of a trajectory that has ended, and is stored."""
        ...


class PulledVersion(msgspec.Struct, frozen=True):
    """A complete version in this host's shared memory, verified against `digest`."""

    version: int
    path: str
    digest: str


class VersionLostError(Exception):
    """The version asked for is on no relay any more."""


class WeightSource(Protocol):
    """Source of weights for a replica: its local relay (or a folder, in tests).

    All three raise a `RuntimeError` that says why if the relay cannot hold a version.
    """

    async def latest(self) -> int:
        """The newest complete version here; waits for the first."""
        ...

    async def wait_newer(self, version: int) -> int:
        """The newest complete version, once it is above `version`."""
        ...

    async def pull(self, version: int | None = None) -> PulledVersion:
        """Pull that version (default the newest), held until the next pull. Raises `VersionLostError`."""
        ...


class ScorerHandle(Protocol):
    """A scorer, in whatever process it runs."""

    @property
    def at_once(self) -> int:
        """Responses that it works on at the same time."""
        ...

    async def submit_responses(self, responses: Sequence[Unscored]) -> None:
        """Hand responses over, each of which gets a score; a failure is a score with its reason."""
        ...

    def look_ahead(self, responses: Sequence[Unfinished]) -> None:
        """Show it responses that still generate, for terms that work ahead; nothing comes back."""
        ...

    async def next_scores(self) -> list[Score]:
        """Scores that are there, once there are any."""
        ...
