"""The inference engine: its requests, its answers, its calls (`InferenceEngine`) and its errors.

A replica calls an engine. `tests/engines/engine_conformance.py` tests the behaviour that all engines share.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.pieces import RoutedExperts, SamplingMask
from laminar_py.records.proofs import WeightsChecksum
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import FinishReason


class EngineLostError(Exception):
    """The engine crashed, hangs or sent an invalid answer; the message says which, in one line.

    `__cause__` is set if the engine's own code raised; such a mistake in the code ends the run.
    """


class StoreFullError(EngineLostError):
    """The replica cannot write to its folder of segments, e.g. on a full disk. Other hosts may still write."""


class RefusedError(ValueError):
    """The engine refuses a request that it can never serve, or weights that do not fit, and keeps serving.

    The message says why.
    """


class PauseMode(StrEnum):
    """Effect of `InferenceEngine.pause` on running requests: SGLang's three modes, and `RELEASE`."""

    ABORT = "abort"  # end them and deliver their partial responses
    RETRACT = "retract"  # put them back into the queue and prefill them again
    IN_PLACE = "in_place"  # stop them where they are and keep their KV cache
    RELEASE = "release"  # as RETRACT; and a GPU gets back the memory of the KV cache, until `resume`


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine draws tokens, e.g. `SamplingParams(max_new_tokens=344, stop_ids=(1,))`.

    A token's random number depends only on `seed` and its position, not on other requests in the batch. SGLang
    uses `seed` in its deterministic mode only.
    """

    max_new_tokens: int  # cap on all response tokens, including the prefix of a resumed request
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: the whole vocabulary
    top_p: float = 1.0  # 1: the whole vocabulary
    min_p: float = 0.0  # 0: the whole vocabulary
    stop_ids: tuple[int, ...] = ()
    seed: int = 0


class EarlierText(msgspec.Struct, frozen=True):
    """A finished response to the prompt of a request, e.g. `EarlierText("g3.1", ids, 7)`."""

    rid: str  # its request
    ids: IntArray  # [L]
    version: int  # weights that sampled its last token


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to continue `prompt_ids + prefix_ids`, e.g. of "g3.1" after an abort at token 41:

    `GenerateRequest(rid="g3.1", group_id="g3", prompt_ids=prompt, prefix_ids=ids[:41], sampling=sampling)`.
    """

    rid: str
    group_id: str  # requests of one group share their prompt, so an engine may prefill it once
    prompt_ids: IntArray  # [P]
    prefix_ids: IntArray  # [L so far], generated earlier
    sampling: SamplingParams
    routed: int = 0  # leading positions whose experts are recorded already
    has_turns: bool = False  # a request with this `rid` and a longer prefix may follow: keep the KV cache
    earlier: tuple[EarlierText, ...] = ()  # that an engine with drafts may not know, the oldest first


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request, all generated under `version`; the last delta has a finish reason.

    E.g. `Delta(rid="g3.1", ids=ids, logprobs=logprobs, version=7)`. When an engine changes weights during a
    stream, it may learn the new version's first token only when the stream ends. Then `spans` in the last delta
    covers the whole stream and replaces the `version` of all earlier deltas.
    """

    rid: str
    ids: IntArray  # [n] new response tokens, n >= 0
    logprobs: FloatArray  # [n] of each token in the distribution that it was drawn from
    version: int
    finish_reason: FinishReason | None = None
    kv_version: int | None = None  # as in `Span`
    spans: tuple[Span, ...] | None = None  # cover [0, tokens of this stream)
    sampling_mask: SamplingMask | None = None  # n rows
    routed_experts: RoutedExperts | None = None  # in the last delta, from position `GenerateRequest.routed` on


class DraftCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Draft tokens of speculation, and the accepted ones among them, by the text that they are from.

    E.g. `DraftCounts(drafted_earlier=120, accepted_earlier=96, verified=104)`. Each response has texts of three
    kinds: itself, other responses to its prompt that are under way, and finished ones.
    """

    drafted_own: int = 0
    drafted_sibling: int = 0
    drafted_earlier: int = 0
    accepted_own: int = 0
    accepted_sibling: int = 0
    accepted_earlier: int = 0
    verified: int = 0  # tokens that passes over drafts sampled, accepted ones among them
    near: int = 0  # verified tokens whose random number lies within rounding (1e-5) of another token

    @property
    def drafted(self) -> int:
        """Draft tokens of all kinds."""
        return self.drafted_own + self.drafted_sibling + self.drafted_earlier

    @property
    def accepted(self) -> int:
        """Accepted tokens of all kinds."""
        return self.accepted_own + self.accepted_sibling + self.accepted_earlier

    @property
    def accepted_per_pass(self) -> float:
        """Accepted tokens of a sequence in a pass over drafts, e.g. 1.5 if a pass gives 2.5 tokens; else 0."""
        passes = self.verified - self.accepted
        return self.accepted / passes if passes > 0 else 0.0

    def plus(self, other: Self) -> Self:
        """Return the sums of both counts."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return type(self)(**dict(zip(self.__struct_fields__, (one + two for one, two in pairs), strict=True)))

    def since(self, before: Self) -> Self:
        """Return the counts since `before`; all, if any is lower, since another engine counts then."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(before), strict=True)
        grown = [one - two for one, two in pairs]
        return self if min(grown) < 0 else type(self)(**dict(zip(self.__struct_fields__, grown, strict=True)))


def sum_drafts(counts: Iterable[DraftCounts]) -> DraftCounts:
    """Return the sums of all counts."""
    return reduce(DraftCounts.plus, counts, DraftCounts())


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Load of an engine, e.g. `EngineStatus(running=64, waiting=3, kv_used=5120, kv_capacity=131072, version=7)`.

    `kv_used` leaves out caches between turns, which the engine drops when a request needs the room.
    """

    running: int  # requests
    waiting: int  # requests
    kv_used: int  # tokens
    kv_capacity: int  # tokens
    version: int  # -1 before the first load
    drafts: DraftCounts = DraftCounts()  # since the engine started
    speedups: dict[int, float] = {}
    """Rate with drafts over the rate without, in CPU seconds of the last trials, by the sequences of a step.

    The key 4 stands for 4 to 7 sequences. Sizes are left out until both ways were tried.
    """
    corpus_bytes: int = 0  # memory of the finished responses that drafts come from


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedTensor:
    """Changes of a tensor in a file, e.g. `ChangedTensor(name=name, dtype="BF16", num=3, at=88, to=112)`."""

    name: str
    dtype: str  # of the values, as safetensors names it
    num: int  # values
    at: int  # first byte of the places
    to: int  # first byte of the values


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A file of changes, mapped, e.g. `CheckedFile(Path("/dev/shm/laminar-x/changes-8"), tensors, data)`."""

    path: Path
    tensors: tuple[ChangedTensor, ...]
    data: npt.NDArray[np.uint8]  # the bytes of the file; the mapping outlives its name


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedChanges:
    """Files that an engine has checked, e.g. `CheckedChanges(base=7, version=8, files=(file,))`.

    They lead in turn from the version `base` to `version`.
    """

    base: int
    version: int
    files: tuple[CheckedFile, ...]


class InferenceEngine(Protocol):
    """Continuous-batching engine. Every method raises `EngineLostError` once the engine is lost."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Generate for a request, and yield its new tokens; the last delta has a finish reason.

        Raises `RefusedError` if the request can never be served, `ValueError` if its `rid` is in flight.
        """
        ...

    async def abort(self, rid: str) -> None:
        """End the stream of `rid`: it delivers its remaining tokens with finish reason ABORT."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating, and abort, retract or keep running requests by `mode`."""
        ...

    async def resume(self) -> None:
        """Continue generating after `pause`."""
        ...

    async def load_weights(self, path: Path, version: int) -> None:
        """Serve the safetensors in the folder `path` as `version`, from the next token on.

        Raises `RefusedError` if the files do not fit, `RuntimeError` while requests run unpaused, and `ValueError`
        if `version` is lower than the one it serves.
        """
        ...

    @property
    def takes_changes(self) -> bool:
        """False if `check_changes` would refuse all files now, as before the first weights and with an adapter."""
        ...

    async def check_changes(self, files: Sequence[Path], version: int) -> CheckedChanges:
        """Map files of changes (see `records/weights.py`), and check that they fit; requests may run.

        The first file must lead from the served version, and the last file to `version`. Raises `RefusedError` for
        other versions, unknown tensors, places outside a tensor, and values that are not finite.
        """
        ...

    async def load_changes(self, changes: CheckedChanges) -> None:
        """Apply what `check_changes` returned; serve its version from the next token on.

        Raises `RefusedError`, with the old weights in place, if the engine no longer serves the base, or a server
        cannot read the files; `RuntimeError` while requests run unpaused.
        """
        ...

    async def checksum(self) -> WeightsChecksum:
        """Return hashes of the tensors that the engine serves."""
        ...

    async def watch(self) -> None:
        """Wait until cancelled. Raises `EngineLostError` when the engine is lost."""
        ...

    def status(self) -> EngineStatus:
        """Return load and version, current or as the engine last reported them."""
        ...


@runtime_checkable
class PushEngine(InferenceEngine, Protocol):
    """Engine on the caller's event loop that delivers deltas by callback, which saves a task for each stream."""

    def follow(self, request: GenerateRequest, on_delta: Callable[[Delta | EngineLostError], None]) -> None:
        """Start to generate for a request, and return. Later call `on_delta` with each delta.

        If the engine is lost, call `on_delta` with the error instead. `on_delta` must not raise. Raises
        `RefusedError` if the request can never be served, `ValueError` if its `rid` is in flight.
        """
        ...
