"""An inference engine that takes the time of a GPU and computes nothing, to measure schedules with real processes.

A replica calls it on its event loop. `compression` emulated seconds pass in one second of the loop's clock. The
engine has no thread: one timer waits for the next event of the scheduler, another timer delivers tokens of running
requests. Events happen at their exact emulated times, in order, however late a timer fires, so a busy machine
delays only the delivery (`tests/emulation/test_engine.py`). An exception in a timer ends the engine with
`EngineLostError`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from blake3 import blake3

from laminar_lab.emulation.responses import Responses
from laminar_lab.emulation.scheduler import EmulatedScheduler
from laminar_lab.emulation.settings import EngineTimes
from laminar_py.engines import StreamingEngine, weights_layout
from laminar_py.records import EngineStatus, PauseMode
from laminar_py.records.engine import CheckedChanges, RefusedError
from laminar_py.records.proofs import WeightsChecksum

log = logging.getLogger(__name__)


def hash_weights(folder: Path) -> str:
    """Hash of all weights in a folder; `RefusedError` if they cannot be read."""
    weights_layout(folder)
    digest = blake3()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


class EmulatedEngine(StreamingEngine[EmulatedScheduler]):
    """Serves `responses` at the speed of `times`, after the first `load_weights`.

    It runs up to `max_batch` requests at a time in a KV cache of `kv_capacity` tokens. Prompt and response have at
    most `max_len` tokens. A request gets its first token at once, and later tokens every `delta_interval_s`
    seconds of the event loop's clock. The first load takes `late_s` emulated seconds more. `checksum` hashes the
    weights in a folder. Raises `ConfigError` if the cache cannot hold one request.
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
    ) -> None:
        scheduler = EmulatedScheduler(
            times, responses, max_batch=max_batch, max_len=max_len, kv_capacity=kv_capacity
        )
        super().__init__("emulated engine", scheduler, vocab=vocab, max_len=max_len, kv_capacity=kv_capacity)
        self._times = times
        self._compression = compression
        self._delta_interval_s = delta_interval_s
        self._late_s = late_s
        self._hash = checksum
        self._checksum = "unloaded"
        self._released = False  # the KV cache has no memory
        self._due_s: float | None = None  # emulated time of the event timer
        self._event_timer: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start emulated time at 0."""
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()

    async def close(self) -> None:
        """End all streams with ABORT. Every later call raises `EngineLostError`."""
        if self._loss is None:
            await self.pause(PauseMode.ABORT)
            self._stop_with_error("closed")

    async def pause(self, mode: PauseMode) -> None:
        """See `PushEngine.pause`; with RELEASE it takes `hand_over_s`."""
        await super().pause(mode)
        if mode is PauseMode.RELEASE:
            self._released = True
            await self._hand_over_memory()

    async def resume(self) -> None:
        """See `PushEngine.resume`; after RELEASE it takes `hand_over_s`."""
        if self._released:
            await self._hand_over_memory()
            self._released = False
        await super().resume()

    async def _hand_over_memory(self) -> None:
        await asyncio.sleep(self._times.hand_over_s / self._compression)
        self._raise_if_lost()

    async def load_weights(self, path: Path, version: int) -> None:
        """See `InferenceEngine.load_weights`. `RuntimeError` while requests run, `RefusedError` for bad files."""
        self._raise_if_lost()
        checksum = self._hash(path)
        self._post(partial(self._scheduler.begin_load, version))
        loaded = None
        try:
            late_s, self._late_s = self._late_s, 0.0
            await asyncio.sleep((self._times.load_s + late_s) / self._compression)
            self._raise_if_lost()
            self._checksum, loaded = checksum, version
        finally:
            if self._loss is None:
                self._post(partial(self._scheduler.end_load, loaded))

    @property
    def takes_changes(self) -> bool:
        """False: `load_s` of a profile is the time of a whole version."""
        return False

    async def check_changes(self, files: Sequence[Path], version: int) -> CheckedChanges:
        """Refuse: see `takes_changes`."""
        self._raise_if_lost()
        raise RefusedError(
            f"version {version}: the emulated engine has no time for changes; load the whole version"
        )

    async def load_changes(self, changes: CheckedChanges) -> None:
        """Refuse: see `takes_changes`."""
        await self.check_changes([], changes.version)

    async def checksum(self) -> WeightsChecksum:
        """See `InferenceEngine.checksum`: of the files; "unloaded" before the first load."""
        self._raise_if_lost()
        return WeightsChecksum(self._checksum)

    def status(self) -> EngineStatus:
        """See `InferenceEngine.status`; exact at this moment."""
        self._raise_if_lost()
        self._advance(self._now())
        return self._scheduler.status()

    def deliver(self) -> None:
        """Deliver all tokens of running requests now, before the next interval."""
        self._raise_if_lost()
        self._scheduler.advance(self._now())
        self._scheduler.flush()
        self._hand_over()

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

    @property
    def recomputed_s(self) -> float:
        """Emulated seconds of prefills so far of caches that a pause dropped, as of the last `status`."""
        return self._scheduler.recomputed_s

    def _now(self) -> float:
        """Emulated seconds since the start."""
        return (self._loop.time() - self._began_s) * self._compression

    def _post(self, action: Callable[[], None]) -> None:
        self._raise_if_lost()
        self._scheduler.begin_call(self._now())
        action()
        self._hand_over()

    async def _run(self, action: Callable[[], None]) -> None:
        self._post(action)
        await asyncio.sleep(0)  # `_deliver` comes before

    def _hand_over(self) -> None:
        """Have the scheduler's deltas delivered, then set the timers for the next event and flush."""
        if deltas := self._scheduler.take_deltas():
            self._loop.call_soon(self._deliver, deltas)
        due_s = self._scheduler.next_event_s
        if due_s != self._due_s:
            self._set_event_timer(due_s)
        if self._streams and self._flush_timer is None:
            self._flush_timer = self._loop.call_later(self._delta_interval_s, self._on_flush)

    def _set_event_timer(self, due_s: float | None) -> None:
        if self._event_timer is not None:
            self._event_timer.cancel()
        self._due_s, self._event_timer = due_s, None
        if due_s is not None:
            at_s = self._began_s + due_s / self._compression
            self._event_timer = self._loop.call_at(at_s, self._on_event, due_s)

    def _on_event(self, due_s: float) -> None:
        """Advance to the event at `due_s`, even if rounding fires the timer a little early."""
        self._due_s = self._event_timer = None
        self._run_timer(partial(self._advance, max(due_s, self._now())))

    def _on_flush(self) -> None:
        self._flush_timer = None
        self._run_timer(self.deliver)

    def _advance(self, now: float) -> None:
        self._scheduler.advance(now)
        self._hand_over()

    def _run_timer(self, act: Callable[[], None]) -> None:
        """Call `act` from a timer. An exception ends the engine, since no caller awaits a timer."""
        try:
            act()
        except Exception as error:
            log.exception("the emulated engine failed")
            self._stop_with_error(" ".join(f"{type(error).__name__}: {error}".split()), error)

    def _stop_with_error(self, reason: str, cause: Exception | None = None) -> None:
        for timer in (self._event_timer, self._flush_timer):
            if timer is not None:
                timer.cancel()
        self._lose(reason, cause)
