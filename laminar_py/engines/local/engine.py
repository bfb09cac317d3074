"""The embedded inference engine: `PushEngine` on one thread of this process, for laptops and tests.

A replica calls it on its event loop. The event loop owns the streams; the engine's thread owns the scheduler, the
KV cache and the model. Commands cross in one direction, batches of deltas in the other, both in order. Only the
engine's thread changes objects of the scheduler. When the thread ends, the engine is lost: every later call raises
`EngineLostError`, and every open stream receives the error (`tests/engines/engine_conformance.py`).
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from laminar_py.config.section import ConfigError
from laminar_py.engines.base import StreamingEngine
from laminar_py.engines.local.scheduler import Scheduler
from laminar_py.engines.local.spec import ModelSpec
from laminar_py.records.engine import CheckedChanges, EngineLostError, EngineStatus, GenerateRequest, PauseMode
from laminar_py.records.pieces import Recording
from laminar_py.records.proofs import WeightsChecksum

log = logging.getLogger(__name__)


class LocalEngine(StreamingEngine[Scheduler]):
    """Serves the model in `model_dir` once `load_weights` has given it weights.

    It decodes up to `max_batch` requests at a time in a KV cache of `kv_capacity` tokens. Prompt and response have
    at most `max_len` tokens. A stream gets a delta every `stream_interval` tokens. Raises `ConfigError` if the
    engine cannot compute the model, the model has no experts to record, or the cache cannot hold one request.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        max_batch: int,
        max_len: int,
        kv_capacity: int,
        stream_interval: int = 32,
        record: tuple[Recording, ...] = (),
        drafts: bool = False,
        quantized: bool = False,
    ) -> None:
        spec = replace(ModelSpec.read(model_dir), quantized=quantized)
        if Recording.ROUTED_EXPERTS in record and spec.mixture is None:
            raise ConfigError(
                f"rollout.record=routed_experts: the model in model.path={model_dir} has no experts; leave it out"
            )
        scheduler = Scheduler(
            spec,
            num_slots=max_batch,
            max_len=max_len,
            kv_capacity=kv_capacity,
            stream_interval=stream_interval,
            record=record,
            drafts=drafts,
        )
        super().__init__("embedded engine", scheduler, vocab=spec.vocab, max_len=max_len, kv_capacity=kv_capacity)
        self._changed = threading.Condition()
        self._posted: list[Callable[[], None]] = []  # commands of this loop iteration
        self._commands: list[Callable[[], None]] = []  # guarded by _changed
        self._closing = False  # guarded by _changed
        self._num_posted = self._num_taken = 0  # requests sent to the thread, and received by it
        self._pending: set[asyncio.Future[None]] = set()

    async def start(self) -> None:
        """Start the engine's thread, which runs until `close` or the end of the process."""
        self._loop = asyncio.get_running_loop()
        ended = Future[None]()
        threading.Thread(target=self._live, args=(ended,), name="laminar-engine", daemon=True).start()
        self._thread = asyncio.wrap_future(ended)
        self._thread.add_done_callback(self._on_stopped)

    async def close(self) -> None:
        """End all streams with ABORT, then end the thread. Does nothing to a lost engine."""
        with suppress(EngineLostError):
            await self.pause(PauseMode.ABORT)
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.wait([self._thread])

    async def load_weights(self, path: Path, version: int) -> None:
        """Load the version in `path`. `RuntimeError` while requests run unpaused, `RefusedError` for bad files."""
        await self._run(partial(self._scheduler.load_weights, path, version))

    @property
    def takes_changes(self) -> bool:
        """See `InferenceEngine.takes_changes`: with whole weights."""
        return self._scheduler.takes_changes

    async def check_changes(self, files: Sequence[Path], version: int) -> CheckedChanges:
        """See `InferenceEngine.check_changes`; beside the engine's thread."""
        self._raise_if_lost()
        return await asyncio.to_thread(self._scheduler.check_changes, files, version)

    async def load_changes(self, changes: CheckedChanges) -> None:
        """Put changed positions into the served tensors, between two steps. Errors as `load_weights`."""
        await self._run(partial(self._scheduler.load_changes, changes))

    async def checksum(self) -> WeightsChecksum:
        """Hash the loaded weights in the engine's thread."""
        answer: list[WeightsChecksum] = []
        await self._run(lambda: answer.append(self._scheduler.checksum()))
        return answer[0]

    def status(self) -> EngineStatus:
        """Report load and served version. Requests on their way to the thread count as waiting."""
        self._raise_if_lost()
        status = self._scheduler.status()
        num_unseen = self._num_posted - self._num_taken
        return msgspec.structs.replace(status, waiting=status.waiting + num_unseen)

    # ---- the event loop's side

    def _add_request(self, ticket: int, request: GenerateRequest) -> None:
        """Post the request to the thread, and count it as waiting until the thread runs `add`."""

        def add() -> None:
            self._scheduler.add_request(ticket, request)
            self._num_taken += 1

        self._num_posted += 1
        self._post(add)

    def _post(self, action: Callable[[], None]) -> None:
        """Queue `action` for the thread. `EngineLostError` of a lost engine."""
        self._raise_if_lost()
        if not self._posted:
            self._loop.call_soon(self._pass_on)
        self._posted.append(action)

    def _pass_on(self) -> None:
        """Pass all commands of this loop iteration to the thread at once.

        Requests that arrive together then share every step, whatever the thread switches do, so runs repeat.
        """
        with self._changed:
            self._commands += self._posted
            self._changed.notify()
        self._posted = []

    async def _run(self, action: Callable[[], None]) -> None:
        """Call `action` in the engine's thread and await its end. Raises its error or `EngineLostError`."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._post(partial(self._execute, action, done))
        self._pending.add(done)
        done.add_done_callback(self._pending.discard)
        await done

    def _on_stopped(self, thread: asyncio.Future[None]) -> None:
        """Fail all waiting commands and streams, since the thread answers none of them any more."""
        error, reason = thread.exception(), "closed"
        if isinstance(error, EngineLostError):
            reason = str(error)
        elif error is not None:
            log.error("the embedded engine's thread failed", exc_info=error)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
        loss = self._lose(reason, error)
        for done in list(self._pending):
            _resolve(done, loss)

    # ---- the engine's thread

    def _live(self, ended: Future[None]) -> None:
        """Run the engine's thread until it closes: carry out commands, generate a step, pass the deltas on.

        `ended` gets the error that stopped the thread, or None.
        """
        try:
            torch.set_flush_denormal(True)  # in this thread: products with denormal weights are 100 times slower
            with torch.inference_mode():
                while not self._closing:
                    for command in self._next_commands():
                        command()
                    if self._scheduler.has_work:
                        self._scheduler.step()
                    self._pass_deltas()
        except BaseException as error:  # noqa: BLE001 - `_on_stopped` passes it to every waiting caller
            ended.set_exception(error)
        else:
            ended.set_result(None)

    def _next_commands(self) -> list[Callable[[], None]]:
        """Take the commands since the last call. Waits for a command while there is nothing to generate."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._closing or self._scheduler.has_work)
            commands, self._commands = self._commands, []
        return commands

    def _execute(self, action: Callable[[], None], done: asyncio.Future[None]) -> None:
        """Run `action` in the engine thread, send its deltas, then resolve `done` with its error or None."""
        refusal: Exception | None = None
        try:
            action()
        except (ValueError, RuntimeError, OSError) as error:
            refusal = error
        self._pass_deltas()
        self._loop.call_soon_threadsafe(_resolve, done, refusal)

    def _pass_deltas(self) -> None:
        deltas = self._scheduler.take_deltas()
        if deltas:
            self._loop.call_soon_threadsafe(self._deliver, deltas)


def _resolve(done: asyncio.Future[None], error: BaseException | None) -> None:
    """Complete `done` with `error` or None, unless its caller was cancelled."""
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
