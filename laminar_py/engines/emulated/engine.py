"""An inference engine that takes the time of a GPU and computes nothing, to measure schedules with real processes.

A replica calls it on its event loop. `compression` emulated seconds pass in one second of the loop's clock. The
engine has no thread: one timer waits for the next event of the scheduler, another timer delivers tokens of running
requests. Events happen at their exact emulated times, in order, however late a timer fires, so a busy machine
delays only the delivery (`tests/engines/emulated/test_engine.py`). An exception in a timer ends the engine with
`EngineLostError`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVarTuple

from blake3 import blake3

from laminar_py.config.emulation import EngineTimes
from laminar_py.config.section import ConfigError
from laminar_py.engines.checks import check_request, weights_layout
from laminar_py.engines.emulated.responses import Responses
from laminar_py.engines.emulated.scheduler import EmulatedScheduler
from laminar_py.records.engine import Delta, EngineLostError, EngineStatus, GenerateRequest, PauseMode

log = logging.getLogger(__name__)
Ts = TypeVarTuple("Ts")


class PushStream:
    """Calls `hear` with each delta in the next iteration of the event loop.

    Needs no bound, as it empties at once.
    """

    __slots__ = ("_arrived", "_hear", "_is_due", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, hear: Callable[[Delta | EngineLostError], None]) -> None:
        self._loop = loop
        self._hear = hear
        self._arrived: list[Delta | EngineLostError] = []
        self._is_due = False

    def add(self, news: Delta | EngineLostError) -> None:
        """Queue a delta, or the loss of the engine, for `hear`."""
        self._arrived.append(news)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._call_hear)

    def _call_hear(self) -> None:
        self._is_due = False
        arrived, self._arrived = self._arrived, []
        for news in arrived:
            self._hear(news)


class PullStream:
    """Deltas that wait for their one reader. A response bounds their number, so the stream needs no bound."""

    __slots__ = ("_arrived", "_filled", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: list[Delta | EngineLostError] = []
        self._filled: asyncio.Future[None] | None = None  # while the reader waits

    def add(self, news: Delta | EngineLostError) -> None:
        """Queue a delta, or the loss of the engine, and wake the reader."""
        self._arrived.append(news)
        if self._filled is not None and not self._filled.done():
            self._filled.set_result(None)

    async def next_deltas(self) -> list[Delta | EngineLostError]:
        """Wait for unread entries, at least one, and return them."""
        if not self._arrived:
            self._filled = self._loop.create_future()
            await self._filled
        arrived, self._arrived = self._arrived, []
        return arrived


def hash_weights(folder: Path) -> str:
    """Hash of all weights in a folder; `RefusedError` if they cannot be read."""
    weights_layout(folder)
    digest = blake3()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


class EmulatedEngine:
    """Serves `responses` at the speed of `times`, after the first `load_weights`.

    It runs up to `max_batch` requests at a time in a KV cache of `kv_capacity` tokens. Prompt and response have at
    most `max_len` tokens. A request gets its first token at once, and later tokens every `delta_interval_s`
    seconds of the event loop's clock. The first load takes `late_s` emulated seconds more. `checksum` hashes the
    weights in a folder. The engine calls `changed` when `busy` changes. Raises `ConfigError` if the cache cannot
    hold one request.
    """

    def __init__(
        self,
        times: EngineTimes,
        responses: Responses,
        *,
        vocab: int,
        max_batch: int,
        max_len: int,
        kv_capacity: int,
        compression: float = 1.0,
        delta_interval_s: float = 0.5,
        late_s: float = 0.0,
        checksum: Callable[[Path], str] = hash_weights,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        if kv_capacity < max_len:
            raise ConfigError(
                f"rollout.kv_capacity={kv_capacity} cannot hold one trajectory of rollout.max_len={max_len};"
                " raise kv_capacity"
            )
        self._times = times
        self._responses = responses
        self._vocab = vocab
        self._max_len = max_len
        self._compression = compression
        self._delta_interval_s = delta_interval_s
        self._late_s = late_s
        self._hash = checksum
        self._changed = changed
        self._pace = 1.0
        self.busy = False  # True while there are steps to make
        self._scheduler = EmulatedScheduler(times, max_batch=max_batch, max_len=max_len, kv_capacity=kv_capacity)
        self._streams: dict[str, PushStream | PullStream] = {}
        self._checksum = "unloaded"
        self._lost = asyncio.Event()
        self._loss: EngineLostError | None = None
        self._due_s: float | None = None  # emulated time of the event timer
        self._event_timer: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start emulated time at 0."""
        self._loop = asyncio.get_running_loop()
        self._began_s, self._passed_s = self._loop.time(), 0.0

    async def close(self) -> None:
        """End all streams with ABORT. Every later call raises `EngineLostError`."""
        if self._loss is None:
            await self.pause(PauseMode.ABORT)
            self._stop_with_error("closed")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """See `InferenceEngine.generate`. `RefusedError` names what cannot be served."""
        rid, stream = request.rid, PullStream(self._loop)
        self._open(request, stream)
        try:
            while True:
                for news in await stream.next_deltas():
                    if isinstance(news, EngineLostError):
                        raise news
                    yield news
                    if news.finish_reason is not None:
                        return
        finally:
            if self._loss is None and self._streams.get(rid) is stream:
                del self._streams[rid]
                self._scheduler.abort(self._now(), rid)
                self._deliver()

    def follow(self, request: GenerateRequest, hear: Callable[[Delta | EngineLostError], None]) -> None:
        """See `PushEngine.follow`. `RefusedError` names what cannot be served."""
        self._open(request, PushStream(self._loop, hear))

    async def abort(self, rid: str) -> None:
        """See `InferenceEngine.abort`. Ignores an unknown `rid`."""
        self._raise_if_lost()
        self._scheduler.abort(self._now(), rid)
        self._deliver()

    async def pause(self, mode: PauseMode) -> None:
        """See `InferenceEngine.pause`. Every token generated so far is in its stream when this returns."""
        self._raise_if_lost()
        self._scheduler.pause(self._now(), mode)
        self._deliver()

    async def resume(self) -> None:
        """See `InferenceEngine.resume`."""
        self._raise_if_lost()
        self._scheduler.resume(self._now())
        self._deliver()

    async def load_weights(self, path: Path, version: int) -> None:
        """See `InferenceEngine.load_weights`. `RuntimeError` while requests run, `RefusedError` for bad files."""
        self._raise_if_lost()
        checksum = self._hash(path)
        self._scheduler.begin_load(self._now(), version)
        loaded = None
        try:
            self._deliver()
            late_s, self._late_s = self._late_s, 0.0
            await asyncio.sleep((self._times.load_s + late_s) / self._compression)
            self._raise_if_lost()
            self._checksum, loaded = checksum, version
        finally:
            if self._loss is None:
                self._scheduler.end_load(self._now(), loaded)
                self._deliver()

    async def checksum(self) -> str:
        """See `InferenceEngine.checksum`: of the files; "unloaded" before the first load."""
        self._raise_if_lost()
        return self._checksum

    async def watch(self) -> None:
        """See `InferenceEngine.watch`. Also raises `EngineLostError` after `close`."""
        await self._lost.wait()
        self._raise_if_lost()

    def status(self) -> EngineStatus:
        """See `InferenceEngine.status`; exact at this moment."""
        self._raise_if_lost()
        self._advance(self._now())
        return self._scheduler.status()

    def pace(self, share: float) -> None:
        """From now on make steps at `share` of the full speed."""
        if share == self._pace:
            return
        self._passed_s, self._began_s = self._now(), self._loop.time()
        self._pace = share
        self._set_event_timer(self._due_s)

    def deliver(self) -> None:
        """Deliver all tokens of running requests now, before the next interval."""
        self._raise_if_lost()
        self._scheduler.advance(self._now())
        self._scheduler.flush()
        self._deliver()

    def lengths(self) -> dict[str, int]:
        """Response tokens of each running request, delivered or not, as of the last `status`."""
        return self._scheduler.lengths()

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, as of the last `status`."""
        return self._scheduler.num_tokens

    @property
    def busy_s(self) -> float:
        """Emulated seconds of its prefills and steps so far, as of the last `status`."""
        return self._scheduler.busy_s

    def _now(self) -> float:
        """Emulated seconds since the start."""
        return self._passed_s + (self._loop.time() - self._began_s) * self._compression * self._pace

    def _open(self, request: GenerateRequest, stream: PushStream | PullStream) -> None:
        self._raise_if_lost()
        if request.rid in self._streams:
            raise ValueError(f"rid={request.rid}: is being generated already; abort it first")
        check_request(request, max_len=self._max_len, vocab=self._vocab)
        self._streams[request.rid] = stream
        self._scheduler.add_request(self._now(), request, self._responses.respond(request))
        self._deliver()

    def _deliver(self) -> None:
        """Pass the scheduler's deltas to their streams, then set the timers for the next event and flush."""
        for delta in self._scheduler.take_deltas():
            stream = self._streams.get(delta.rid)
            if stream is not None:
                stream.add(delta)
                if delta.finish_reason is not None:
                    del self._streams[delta.rid]
        due_s = self._scheduler.next_event_s
        if due_s != self._due_s:
            self._set_event_timer(due_s)
        if self.busy != (due_s is not None):
            self.busy = due_s is not None
            self._changed()
        if self._streams and self._flush_timer is None:
            self._flush_timer = self._loop.call_later(self._delta_interval_s, self._flush)

    def _set_event_timer(self, due_s: float | None) -> None:
        if self._event_timer is not None:
            self._event_timer.cancel()
        self._due_s, self._event_timer = due_s, None
        if due_s is not None:
            ahead_s = (due_s - self._passed_s) / (self._compression * self._pace)
            self._event_timer = self._loop.call_at(self._began_s + ahead_s, self._on_event, due_s)

    def _on_event(self, due_s: float) -> None:
        """Advance to the event at `due_s`, even if rounding fires the timer a little early."""
        self._due_s = self._event_timer = None
        self._run_timer(self._advance, max(due_s, self._now()))

    def _flush(self) -> None:
        self._flush_timer = None
        self._run_timer(self.deliver)

    def _advance(self, now: float) -> None:
        self._scheduler.advance(now)
        self._deliver()

    def _run_timer(self, act: Callable[[*Ts], None], *args: *Ts) -> None:
        """Call `act` from a timer. An exception ends the engine, since no caller awaits a timer."""
        try:
            act(*args)
        except Exception as error:
            log.exception("the emulated engine failed")
            self._stop_with_error(" ".join(f"{type(error).__name__}: {error}".split()), error)

    def _stop_with_error(self, reason: str, cause: Exception | None = None) -> None:
        self._loss = EngineLostError(f"emulated engine: {reason}")
        self._loss.__cause__ = cause
        self._lost.set()
        for timer in (self._event_timer, self._flush_timer):
            if timer is not None:
                timer.cancel()
        for stream in self._streams.values():
            stream.add(self._loss)

    def _raise_if_lost(self) -> None:
        if self._loss is not None:
            raise self._loss
