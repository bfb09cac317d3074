"""An inference engine that takes a GPU's time and computes nothing: for measuring schedules with real processes.

Called by a replica on its event loop, whose clock it goes by: `compression` emulated seconds pass in one of its
seconds. It has no thread; one timer stands at the next event of the scheduler, another delivers what running
requests have. Invariant: events happen at their exact emulated times, in order, however late a timer fires, so a
busy machine delays only when others hear of them. A timer that fails is the loss of the engine.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVarTuple

from blake3 import blake3

from laminar_py.config.emulation import EngineTimes
from laminar_py.config.section import ConfigError
from laminar_py.engines.emulated.responses import Responses
from laminar_py.engines.emulated.scheduler import EmulatedScheduler
from laminar_py.engines.requests import check_request, weights_layout
from laminar_py.records.engine import Delta, EngineLostError, EngineStatus, GenerateRequest, PauseMode


class CallbackStream:
    """Deltas that `hear` is told in the next turn of the event loop; a stream holds little more than these."""

    __slots__ = ("_arrived", "_hear", "_is_due", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, hear: Callable[[Delta | EngineLostError], None]) -> None:
        self._loop = loop
        self._hear = hear
        self._arrived: list[Delta | EngineLostError] = []
        self._is_due = False

    def deliver(self, news: Delta | EngineLostError) -> None:
        """Have a delta, or the loss of the engine, be told."""
        self._arrived.append(news)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._is_due = False
        arrived, self._arrived = self._arrived, []
        for news in arrived:
            self._hear(news)


class DeltaStream:
    """Deltas that wait to be read, by one reader."""

    __slots__ = ("_arrived", "_filled", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: list[Delta | EngineLostError] = []
        self._filled: asyncio.Future[None] | None = None  # while the reader waits

    def deliver(self, news: Delta | EngineLostError) -> None:
        """Have a delta be read, or the loss of the engine be raised."""
        self._arrived.append(news)
        if self._filled is not None and not self._filled.done():
            self._filled.set_result(None)

    async def next_news(self) -> list[Delta | EngineLostError]:
        """News that nobody has read, one at least."""
        if not self._arrived:
            self._filled = self._loop.create_future()
            await self._filled
        arrived, self._arrived = self._arrived, []
        return arrived


log = logging.getLogger(__name__)
Ts = TypeVarTuple("Ts")


def hash_weights(folder: Path) -> str:
    """Hash of all weights in a folder; `RefusedError` if they cannot be read."""
    weights_layout(folder)
    digest = blake3()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


class EmulatedEngine:
    """Answers with `responses` at the pace of `times`, once `load_weights` was called.

    It runs `max_batch` requests at a time, of at most `max_len` tokens with their prompt, in a KV cache of
    `kv_capacity` tokens. A request's first token is delivered at once, the others every `delta_interval_s` seconds
    of the event loop's clock. The first load takes `late_s` emulated seconds more. `checksum` hashes the weights
    in a folder. `changed` is called when it begins or ends to be `busy`. `ConfigError` if the cache cannot hold
    one request.
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
        self._streams: dict[str, CallbackStream | DeltaStream] = {}
        self._checksum = "unloaded"
        self._lost = asyncio.Event()
        self._loss: EngineLostError | None = None
        self._due_s: float | None = None  # emulated time that the event timer stands at
        self._event_timer: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Emulated time begins."""
        self._loop = asyncio.get_running_loop()
        self._began_s, self._passed_s = self._loop.time(), 0.0

    async def close(self) -> None:
        """End all streams with ABORT; the engine is of no use any more."""
        if self._loss is None:
            await self.pause(PauseMode.ABORT)
            self._lose("closed")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """See `InferenceEngine.generate`. `RefusedError` names what cannot be served."""
        rid, stream = request.rid, DeltaStream(self._loop)
        self._open(request, stream)
        try:
            while True:
                for news in await stream.next_news():
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
        self._open(request, CallbackStream(self._loop, hear))

    async def abort(self, rid: str) -> None:
        """See `InferenceEngine.abort`. An unknown `rid` is fine."""
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
        """See `InferenceEngine.load_weights`. `RuntimeError` if requests run, `RefusedError` for bad files."""
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
        """See `InferenceEngine.watch`: an engine that is closed is lost too."""
        await self._lost.wait()
        self._raise_if_lost()

    def status(self) -> EngineStatus:
        """See `InferenceEngine.status`; exact at this moment."""
        self._raise_if_lost()
        self._advance(self._now())
        return self._scheduler.status()

    def pace(self, share: float) -> None:
        """Make steps at that share of the speed from now on."""
        if share == self._pace:
            return
        self._passed_s, self._began_s = self._now(), self._loop.time()
        self._pace = share
        self._set_event_timer(self._due_s)

    def deliver(self) -> None:
        """Hand over all that running requests have by now, without waiting for the next interval."""
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

    def _open(self, request: GenerateRequest, stream: CallbackStream | DeltaStream) -> None:
        self._raise_if_lost()
        if request.rid in self._streams:
            raise ValueError(f"rid={request.rid}: is being generated already; abort it first")
        check_request(request, max_len=self._max_len, vocab=self._vocab)
        self._streams[request.rid] = stream
        self._scheduler.submit(self._now(), request, self._responses.respond(request))
        self._deliver()

    def _deliver(self) -> None:
        """Hand over what has left, and set the timers anew."""
        for delta in self._scheduler.take_deltas():
            stream = self._streams.get(delta.rid)
            if stream is not None:
                stream.deliver(delta)
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
        """The timer may fire a rounding error early; the event is due nevertheless."""
        self._due_s = self._event_timer = None
        self._guard(self._advance, max(due_s, self._now()))

    def _flush(self) -> None:
        self._flush_timer = None
        self._guard(self.deliver)

    def _advance(self, now: float) -> None:
        self._scheduler.advance(now)
        self._deliver()

    def _guard(self, act: Callable[[*Ts], None], *args: *Ts) -> None:
        """Do what a timer is for. Nobody awaits that: what fails there ends the engine."""
        try:
            act(*args)
        except Exception as error:
            log.exception("the emulated engine failed")
            self._lose(" ".join(f"{type(error).__name__}: {error}".split()), error)

    def _lose(self, reason: str, cause: Exception | None = None) -> None:
        self._loss = EngineLostError(f"emulated engine: {reason}")
        self._loss.__cause__ = cause
        self._lost.set()
        for timer in (self._event_timer, self._flush_timer):
            if timer is not None:
                timer.cancel()
        for stream in self._streams.values():
            stream.deliver(self._loss)

    def _raise_if_lost(self) -> None:
        if self._loss is not None:
            raise self._loss
