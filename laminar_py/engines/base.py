"""Base of the engines in a replica's process: their streams (`StreamingEngine`) and requests (`RequestScheduler`).

`LocalEngine` computes the tokens, the engine of `laminar_lab/emulation` only takes the time that a GPU would take.
Both keep the laws of `tests/engines/engine_conformance.py`. A ticket names a request from its arrival to its last
delta, since a later request may have the same `rid`.
"""

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from laminar_py.config.section import ConfigError
from laminar_py.engines.checks import check_load, check_request, response_limit
from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.engine import Delta, EngineLostError, EngineStatus, GenerateRequest, PauseMode
from laminar_py.records.pieces import RoutedExperts, SamplingMask
from laminar_py.records.trajectory import FinishReason

_NO_IDS = np.zeros(0, np.int32)
_NO_LOGPROBS = np.zeros(0, np.float32)


@dataclass(slots=True, eq=False, kw_only=True)
class EngineJob:
    """A request in an engine, e.g. `EngineJob(ticket=7, request=request)`."""

    ticket: int  # names the stream of its deltas
    request: GenerateRequest
    version: int = -1  # the oldest weights in its KV cache, once that is complete
    experts: RoutedExperts | None = None  # recorded before it last waited, from `request.routed` on


JobT = TypeVar("JobT", bound=EngineJob)


class RequestScheduler(ABC, Generic[JobT]):
    """Requests that wait and run, pauses, the served version, and the deltas for the streams.

    A subclass admits requests, generates their tokens in a KV cache of `kv_capacity` tokens, and ends them.
    """

    def __init__(self, *, max_len: int, kv_capacity: int) -> None:
        self._max_len, self._kv_capacity = max_len, kv_capacity
        self._running: dict[int, JobT] = {}  # the oldest admission first
        self._waiting: deque[JobT] = deque()
        self._deltas: list[tuple[int, Delta]] = []
        self._paused = False
        self._version = -1

    def status(self) -> EngineStatus:
        """The engine's load and version. Safe to call from any thread."""
        return EngineStatus(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used=self.kv_used,
            kv_capacity=self._kv_capacity,
            version=self._version,
        )

    def take_deltas(self) -> list[tuple[int, Delta]]:
        """Remove and return the deltas since the last call, each with its ticket, in order."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def add_request(self, ticket: int, request: GenerateRequest) -> None:
        """Queue a valid request, or end it at once with LENGTH if its prefix reaches the response limit."""
        if len(request.prefix_ids) >= response_limit(request, max_len=self._max_len):
            self._add_last_delta(EngineJob(ticket=ticket, request=request), FinishReason.LENGTH)
        else:
            self._queue(self._make_job(ticket, request))

    def abort(self, ticket: int) -> None:
        """End the request of `ticket` with ABORT, whether it runs or waits. Ignores a request that has ended."""
        for job in self._running.values():
            if job.ticket == ticket:
                return self._end(job, FinishReason.ABORT)
        for job in self._waiting:
            if job.ticket == ticket:
                self._waiting.remove(job)
                return self._add_last_delta(job, FinishReason.ABORT)
        return None

    def pause(self, mode: PauseMode) -> None:
        """Stop generating and send every token so far.

        IN_PLACE keeps the requests running, RETRACT puts them at the head of the queue, ABORT ends all requests.
        RELEASE is RETRACT: these engines keep their caches in the memory of the host.
        """
        self._paused = True
        jobs = list(self._running.values())
        match mode:
            case PauseMode.IN_PLACE:
                for job in jobs:
                    self._send(job)
            case PauseMode.RETRACT | PauseMode.RELEASE:
                for job in reversed(jobs):  # the oldest comes to the head of the queue
                    self._retract(job)
            case PauseMode.ABORT:
                for job in jobs:
                    self._end(job, FinishReason.ABORT)
                while self._waiting:
                    self._add_last_delta(self._waiting.popleft(), FinishReason.ABORT)

    def resume(self) -> None:
        """Generate again after `pause`."""
        self._paused = False

    def check_load(self, version: int) -> None:
        """Raise `RuntimeError` if requests run unpaused, `ValueError` if `version` is older than the served."""
        check_load(version, served=self._version, num_running=0 if self._paused else len(self._running))

    def _queue(self, job: JobT) -> None:
        self._waiting.append(job)

    def _add_delta(
        self,
        job: EngineJob,
        ids: IntArray,
        logprobs: FloatArray,
        finish_reason: FinishReason | None,
        *,
        sampling_mask: SamplingMask | None = None,
        routed_experts: RoutedExperts | None = None,
    ) -> None:
        """Append a delta of `job` to the list that `take_deltas` returns. `ids [n]` and `logprobs [n]` are new."""
        delta = Delta(
            rid=job.request.rid,
            ids=ids,
            logprobs=logprobs,
            version=self._version,
            finish_reason=finish_reason,
            kv_version=job.version if len(ids) and job.version < self._version else None,
            sampling_mask=sampling_mask,
            routed_experts=routed_experts,
        )
        self._deltas.append((job.ticket, delta))

    def _add_last_delta(self, job: EngineJob, finish_reason: FinishReason) -> None:
        """Append the last delta of a job that does not run and has sent all its tokens."""
        self._add_delta(job, _NO_IDS, _NO_LOGPROBS, finish_reason, routed_experts=job.experts)

    @property
    @abstractmethod
    def kv_used(self) -> int:
        """Tokens in the KV cache of running requests, or on their way into it."""

    @abstractmethod
    def _make_job(self, ticket: int, request: GenerateRequest) -> JobT:
        """Make the job of a request that may generate at least one token."""

    @abstractmethod
    def _send(self, job: JobT) -> None:
        """Send the unsent tokens of a running request."""

    @abstractmethod
    def _end(self, job: JobT, finish_reason: FinishReason) -> None:
        """Send the last tokens of a running request and free its room."""

    @abstractmethod
    def _retract(self, job: JobT) -> None:
        """Send the tokens of a running request and move it to the head of the queue."""


SchedulerT = TypeVar("SchedulerT", bound=RequestScheduler)  # type: ignore[type-arg]


class StreamingEngine(ABC, Generic[SchedulerT]):
    """`PushEngine` on the replica's event loop, around a scheduler. Owns the streams and the engine's loss.

    Prompt and response have at most `max_len` tokens with ids below `vocab`. `name` starts the message of
    `EngineLostError`. Raises `ConfigError` if the KV cache cannot hold one request.
    """

    def __init__(self, name: str, scheduler: SchedulerT, *, vocab: int, max_len: int, kv_capacity: int) -> None:
        if kv_capacity < max_len:
            raise ConfigError(
                f"rollout.kv_capacity={kv_capacity} cannot hold one trajectory of rollout.max_len={max_len};"
                " raise kv_capacity"
            )
        self._name, self._vocab, self._max_len = name, vocab, max_len
        self._scheduler = scheduler
        self._tickets = itertools.count()
        self._ticket_by_rid: dict[str, int] = {}
        self._streams: dict[int, Callable[[Delta | EngineLostError], None]] = {}  # callbacks by ticket
        self._loss: EngineLostError | None = None
        self._lost = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield the deltas of a request to its last. Closing the iterator before aborts the request.

        Raises `RefusedError` for a request that the engine can never serve, `EngineLostError` of a lost engine.
        """
        # A stream holds at most max_len deltas, so it needs no bound of its own.
        stream = asyncio.Queue[Delta | EngineLostError]()
        ticket = self._open(request, stream.put_nowait)
        try:
            while True:
                delta = await stream.get()
                if isinstance(delta, EngineLostError):
                    raise delta
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            if self._forget(ticket, request.rid) and self._loss is None:
                self._post(partial(self._scheduler.abort, ticket))

    def follow(self, request: GenerateRequest, on_delta: Callable[[Delta | EngineLostError], None]) -> None:
        """Generate a request and call `on_delta` with each delta, or the engine's loss. Raises as `generate`."""
        self._open(request, on_delta)

    async def abort(self, rid: str) -> None:
        """End the request `rid` with ABORT. Its stream has ended when this returns. Ignores an unknown `rid`."""
        self._raise_if_lost()
        ticket = self._ticket_by_rid.get(rid)
        if ticket is not None:
            await self._run(partial(self._scheduler.abort, ticket))

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating, by `mode`. Every token generated so far is in its stream when this returns."""
        await self._run(partial(self._scheduler.pause, mode))

    async def resume(self) -> None:
        """Generate again after `pause`."""
        await self._run(self._scheduler.resume)

    async def watch(self) -> None:
        """Wait until the engine is lost or closed, then raise `EngineLostError`."""
        await self._lost.wait()
        self._raise_if_lost()

    def _open(self, request: GenerateRequest, on_delta: Callable[[Delta | EngineLostError], None]) -> int:
        """Check a request and pass it to the scheduler. Returns its ticket; `on_delta` receives its deltas."""
        self._raise_if_lost()
        if request.rid in self._ticket_by_rid:
            raise ValueError(f"rid={request.rid}: a request with this rid runs already; abort it first")
        check_request(request, max_len=self._max_len, vocab=self._vocab)
        ticket = next(self._tickets)
        self._streams[ticket] = on_delta
        self._ticket_by_rid[request.rid] = ticket
        self._add_request(ticket, request)
        return ticket

    def _add_request(self, ticket: int, request: GenerateRequest) -> None:
        self._post(partial(self._scheduler.add_request, ticket, request))

    def _deliver(self, deltas: list[tuple[int, Delta]]) -> None:
        """Call the callback of each delta's stream, on the event loop. Ignores deltas of removed streams."""
        for ticket, delta in deltas:
            on_delta = self._streams.get(ticket)
            if on_delta is not None:
                if delta.finish_reason is not None:
                    self._forget(ticket, delta.rid)
                on_delta(delta)

    def _forget(self, ticket: int, rid: str) -> bool:
        """Remove a stream, so that its rid is free again. Returns False if it was removed before."""
        if self._streams.pop(ticket, None) is None:
            return False
        del self._ticket_by_rid[rid]
        return True

    def _lose(self, reason: str, cause: BaseException | None) -> EngineLostError:
        """Mark the engine as lost and pass the error to all streams. Returns the error; later calls raise it."""
        loss = self._loss = EngineLostError(f"{self._name}: {reason}")
        loss.__cause__ = cause
        self._lost.set()
        for on_delta in list(self._streams.values()):
            on_delta(loss)
        return loss

    def _raise_if_lost(self) -> None:
        if self._loss is not None:
            raise self._loss

    @abstractmethod
    def _post(self, action: Callable[[], None]) -> None:
        """Have the scheduler do `action`. Its deltas reach their streams in a later callback of the event loop."""

    @abstractmethod
    async def _run(self, action: Callable[[], None]) -> None:
        """Have the scheduler do `action`. Its deltas are in their streams when this returns."""
