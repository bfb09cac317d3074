"""Workers: processes that call one reward function for a scorer. The pool kills a worker in which a call hangs.

Every call has an outcome (law 6). A call that was alone in a worker which hung or crashed is to blame. If several
calls were in it, the pool repeats each of them with fewer calls beside it, in the end with none.
"""

import asyncio
import logging
from itertools import count
from pathlib import Path

import msgspec

from laminar_py.children.hosted import HostedProcess, ProcessLostError
from laminar_py.config.section import ConfigError
from laminar_py.records.codec import decode, encode
from laminar_py.records.scoring import ScoringRequest
from laminar_py.reward.calls.child import CALLS_AT_ONCE, CallAnswer, CallSpec, CallStarted
from laminar_py.reward.outcome import Outcome, failed, late

log = logging.getLogger(__name__)

STARTS_AGAIN_S = 30.0  # pause after a worker that did not start
SUSPECT_WORKERS = 2  # of the pool that repeats suspect calls: calls that shared a lost worker
NARROWER = 8  # a worker runs so many times fewer suspect calls than other calls
MOST_CRASHES = 3  # of workers over one response, before it fails
START_S = 60.0
WAIT_S = 0.05  # a call waits so long for a free worker before it starts another


class RewardWorker:
    """A process that calls the function (`calls.child`)."""

    def __init__(self, process: HostedProcess, *, concurrency: int) -> None:
        self._process = process
        self.concurrency = concurrency
        self.takes_many = concurrency > 1  # an async function, even if the pool gives it one call at a time
        self.num_calls = 0

    @classmethod
    async def start(cls, spec: CallSpec, *, name: str, log: str) -> "RewardWorker":
        """Start a process and wait until it is ready; it writes into the file `log`.

        Raises `ConfigError` if the process does not start, or cannot load the function.
        """
        log_file = Path(spec.folder) / log
        process = await HostedProcess.start_module(
            "laminar_py.reward.calls.child", variables={"PYTHONUNBUFFERED": "1", **spec.env}, log=log_file
        )
        try:
            started = decode(
                CallStarted, await process.call(encode(msgspec.structs.replace(spec, env={})), limit_s=START_S)
            )
            if started.fault is not None:
                raise ConfigError(started.fault)
        except (TimeoutError, ProcessLostError, msgspec.DecodeError) as error:
            await process.end()
            raise ConfigError(
                f"reward: the process of {name} does not start ({error!r}); see {log_file}"
            ) from error
        except BaseException:  # also when the start is cancelled
            await process.end()
            raise
        return cls(process, concurrency=started.concurrency)

    @property
    def is_lost(self) -> bool:
        """True once the process takes no more calls."""
        return self._process.is_lost

    @property
    def has_room(self) -> bool:
        """True if the process can take another call."""
        return not self.is_lost and self.num_calls < self.concurrency

    async def call(self, request: ScoringRequest, *, limit_s: float) -> Outcome:
        """Call the function for a response and return its outcome.

        Raises `TimeoutError` after `limit_s` seconds, `ProcessLostError` if the process crashes or its reply
        cannot be decoded. After either error the process is killed.
        """
        body = await self._process.call(encode(request), limit_s=limit_s)
        try:
            answer = decode(CallAnswer, body)
        except msgspec.DecodeError as error:  # the function wrote into our socket
            why = "its reply was no CallAnswer"
            self._process.kill(why)
            raise ProcessLostError(why, str(error)) from error
        assert answer.outcome is not None, answer.bug
        return answer.outcome

    async def end(self) -> None:
        """Kill the process and all processes that it started."""
        await self._process.end()


class CallPool:
    """Workers that call the function of `spec`. `async with` starts and ends them.

    The pool starts with one worker, and adds one whenever a call waits, up to `processes`. Each runs at most
    `lanes` calls at a time. Entering raises `ConfigError` if the function cannot be loaded.
    """

    def __init__(self, spec: CallSpec, *, name: str, processes: int = 1, lanes: int = CALLS_AT_ONCE) -> None:
        self._spec = spec
        self._limit_s = spec.timeout_s + spec.grace_s  # after which an unfinished call counts as hanging
        self._name = name
        self._most = processes
        self._lanes = lanes
        self._workers: list[RewardWorker] = []
        self._num_starting = 0
        self._starts_at = 0.0  # on the loop's clock: no new worker before, since the last one did not start
        self._turns = asyncio.Lock()  # calls wait in a fair queue; its first one waits for a worker
        self._changed = asyncio.Condition()
        self._numbers = count()
        self._suspects: CallPool | None = None  # repeats calls that shared a lost worker
        self._num_suspects = 0  # number of such calls
        self._opening = asyncio.Lock()  # guards `_suspects`

    @property
    def concurrency(self) -> int:
        """Number of calls that can run at a time."""
        return self._most * self._lanes

    async def __aenter__(self) -> "CallPool":
        worker = await self._start_worker()
        await self._release_worker(worker)
        self._lanes = worker.concurrency
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._num_suspects = 0
        await self._end_suspects()
        for worker in list(self._workers):  # calls that end meanwhile remove theirs
            await worker.end()

    async def call(self, request: ScoringRequest) -> Outcome:
        """Call the function for a response and return its outcome; repeat the call after a crash of its worker."""
        crashes = 0
        while crashes < MOST_CRASHES:
            try:
                worker = await self._acquire_worker()
            except ConfigError as error:  # e.g. the user changed the file meanwhile
                return failed(str(error))
            alone = worker.concurrency == 1
            try:
                return await worker.call(request, limit_s=self._limit_s)
            except TimeoutError:
                if alone:
                    where = "; an async function must not block" if worker.takes_many else ""
                    hung = late(self._spec.timeout_s, f", and it did not stop{where}")
                    return msgspec.structs.replace(hung, elapsed_s=self._limit_s)
                log.warning(
                    "%s: a worker hung over %s, or over a call beside it", self._name, request.trajectory_id
                )
            except ProcessLostError as error:
                log.warning("%s: a worker was lost over %s: %s", self._name, request.trajectory_id, error)
            finally:
                await self._release_worker(worker)
            if not alone:
                return await self._repeat_suspect(request)
            crashes += 1
        return failed(f"the process that scored it crashed {MOST_CRASHES} times")

    async def _repeat_suspect(self, request: ScoringRequest) -> Outcome:
        """Repeat a call that shared a lost worker, in a second pool with fewer calls per worker."""
        self._num_suspects += 1
        try:
            async with self._opening:
                if self._suspects is None:
                    lanes, name = max(1, self._lanes // NARROWER), f"{self._name}-apart"
                    suspects = CallPool(self._spec, name=name, processes=SUSPECT_WORKERS, lanes=lanes)
                    self._suspects = await suspects.__aenter__()
                suspects = self._suspects
            return await suspects.call(request)
        except ConfigError as error:
            return failed(str(error))
        finally:
            self._num_suspects -= 1
            await self._end_suspects()

    async def _end_suspects(self) -> None:
        """End the second pool if no suspect call is left; else do nothing."""
        async with self._opening:
            if self._suspects is not None and self._num_suspects <= 0:
                suspects, self._suspects = self._suspects, None
                await suspects.__aexit__()

    async def _acquire_worker(self) -> RewardWorker:
        """Wait for a worker with room and reserve it; calls are served in order.

        After `WAIT_S` the call starts a worker, unless there are enough. Raises `ConfigError` if there is none and
        none can start.
        """
        late = asyncio.get_running_loop().time() + WAIT_S
        while True:
            async with self._turns:
                worker = await self._reserve_worker(late)
            if worker is not None:
                return worker
            try:
                return await self._start_worker()
            except ConfigError as error:
                if not self._workers:
                    raise
                self._starts_at = asyncio.get_running_loop().time() + STARTS_AGAIN_S
                log.warning("%s: cannot start another worker; the running ones continue: %s", self._name, error)

    async def _reserve_worker(self, late: float) -> RewardWorker | None:
        """Wait for a worker with room and reserve it; `late` is a time of the event loop.

        Return None if the caller must start a worker: none has room, and it is `late` or there is no worker.
        """
        async with self._changed:
            while True:
                await self._end_lost_workers()
                if free := [worker for worker in self._workers if worker.has_room]:
                    worker = min(free, key=lambda worker: worker.num_calls)
                    worker.num_calls += 1
                    return worker
                is_full = len(self._workers) + self._num_starting >= self._most
                starts_at = max(late if self._workers else 0.0, self._starts_at)
                try:
                    async with asyncio.timeout_at(None if is_full else starts_at):
                        await self._changed.wait()
                except TimeoutError:
                    return None

    async def _start_worker(self) -> RewardWorker:
        """Start a worker and reserve it. Raises `ConfigError`."""
        self._num_starting += 1
        name, log_name = f"{self._name}-{next(self._numbers)}", f"{self._name}.log"
        try:
            worker = await RewardWorker.start(self._spec, name=name, log=log_name)
        finally:
            self._num_starting -= 1
            async with self._changed:
                self._changed.notify_all()
        worker.concurrency = min(worker.concurrency, self._lanes)
        worker.num_calls = 1
        self._workers.append(worker)
        return worker

    async def _release_worker(self, worker: RewardWorker) -> None:
        """Release a worker after a call, remove lost workers, and wake the calls that wait for a worker."""
        async with self._changed:
            worker.num_calls -= 1
            await self._end_lost_workers()
            self._changed.notify_all()

    async def _end_lost_workers(self) -> None:
        """End and remove lost workers without calls, so that others may start in their place."""
        for worker in [worker for worker in self._workers if worker.is_lost and not worker.num_calls]:
            self._workers.remove(worker)
            await worker.end()
