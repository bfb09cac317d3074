"""Processes that call one reward function for a scorer. The pool kills a process in which a call hangs.

Every call has an outcome (law 6). A call that was alone in a process which hung or died is to blame. If several
calls were in it, the pool repeats each of them with fewer calls beside it, in the end with none.
"""

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgspec

from laminar_py.config.section import ConfigError
from laminar_py.records.codec import decode, encode
from laminar_py.records.columns import Column
from laminar_py.records.scoring import ScoringRequest
from laminar_py.records.trajectory import DropReason
from laminar_py.reward.calls.child import CALLS_AT_ONCE, CallAnswer, CallStart, CallStarted
from laminar_py.reward.outcome import Outcome, one_line
from laminar_py.sandbox.hosted import HostedProcess, ProcessLostError

log = logging.getLogger(__name__)

GROWS_AGAIN_S = 30.0  # pause after a process that did not start
APART = 2  # processes that repeat suspect calls
NARROWER = 8  # times fewer suspect calls at a time in a process
LIVES = 3  # processes that one response may take down before it fails
START_S = 60.0
GRACE_S = 3.0  # beyond the timeout that a process keeps itself
OWN_FILES = str(Path(__file__).parent)
FRAME = re.compile(r'File "(.+)", line (\d+) in ')
WAIT_S = 0.05  # a call waits so long for a free process before the pool starts another


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpec:
    """Settings of a process that calls a term, e.g. `CallSpec(term=exact, timeout_s=10, folder=logs)`."""

    term: str  # settings of the term, as JSON
    timeout_s: float  # of a call
    folder: Path  # of the process's logs
    columns: Sequence[Column] = ()  # that the algorithm needs besides a value
    env: Mapping[str, str] = field(default_factory=dict)  # variables it sees besides `hosted.INHERITED_VARIABLES`
    record: Path | None = None  # folder of the run, into which the process may not write
    grace_s: float = GRACE_S

    def start(self, name: str) -> CallStart:
        """Return the first call to the process `name`."""
        return CallStart(
            term=self.term,
            timeout_s=self.timeout_s,
            columns=list(self.columns),
            record=None if self.record is None else str(self.record),
            hang_log=str(self.folder / f"{name}.hangs"),
        )

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the process, besides `hosted.INHERITED_VARIABLES`."""
        return {"PYTHONUNBUFFERED": "1", **self.env}

    @property
    def limit_s(self) -> float:
        """Seconds after which an unfinished call counts as hanging."""
        return self.timeout_s + self.grace_s


class Child:
    """A process that calls the function (`calls.child`)."""

    def __init__(self, process: HostedProcess, *, at_once: int, hang_log: Path) -> None:
        self._process = process
        self._hang_log = hang_log
        self.at_once = at_once
        self.takes_many = at_once > 1  # also if the pool gives it one call at a time
        self.num_calls = 0

    @classmethod
    async def start(cls, spec: CallSpec, *, name: str, log: str) -> "Child":
        """Start a process and wait until it is ready; it writes into the file `log`.

        Raises `ConfigError` if the process does not start, or cannot load the function.
        """
        start, log_file = spec.start(name), spec.folder / log
        process = await HostedProcess.start(
            "laminar_py.reward.calls.child", variables=spec.variables, log=log_file
        )
        try:
            started = decode(CallStarted, await process.call(encode(start), limit_s=START_S))
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
        return cls(process, at_once=started.at_once, hang_log=Path(start.hang_log))

    @property
    def is_lost(self) -> bool:
        """True once the process takes no more calls."""
        return self._process.is_lost

    @property
    def has_room(self) -> bool:
        """True if the process can take another call."""
        return not self.is_lost and self.num_calls < self.at_once

    async def call(self, request: ScoringRequest, *, limit_s: float) -> Outcome:
        """Call the function for a response and return its outcome.

        Raises `TimeoutError` after `limit_s` seconds, `ProcessLostError` if the process dies or sends nonsense.
        Either way the process is gone afterwards.
        """
        body = await self._process.call(encode(request), limit_s=limit_s)
        try:
            answer = decode(CallAnswer, body)
        except msgspec.DecodeError as error:  # the function wrote into our socket
            self._process.kill("it answered nonsense")
            raise ProcessLostError("it answered nonsense", str(error)) from error
        assert answer.outcome is not None, answer.bug
        return answer.outcome

    def hang_place(self) -> str:
        """Return the line of the user's code in which the call hung, e.g. " (at rewards.py:7)", or ""."""
        with suppress(OSError):
            return _place_in_stacks(self._hang_log.read_text(errors="replace"))
        return ""

    async def end(self) -> None:
        """Kill the process and all processes that it started."""
        await self._process.end()
        self._hang_log.unlink(missing_ok=True)


class CallPool:
    """Processes that call the function of `spec`. `async with` starts and ends them.

    The pool starts with one process, and adds one whenever a call waits, up to `processes`. Each runs at most
    `lanes` calls at a time. Entering raises `ConfigError` if the function cannot be loaded.
    """

    def __init__(self, spec: CallSpec, *, name: str, processes: int = 1, lanes: int = CALLS_AT_ONCE) -> None:
        self._spec = spec
        self._name = name
        self._most = processes
        self._lanes = lanes
        self._children: list[Child] = []
        self._turns = asyncio.Lock()  # calls wait in a fair queue; its first one waits for a process
        self._free = asyncio.Condition()
        self._growing: asyncio.Task[None] | None = None
        self._grows_at = 0.0  # on the loop's clock: no new process before, since the last one did not start
        self._numbers = count()
        self._suspects: CallPool | None = None  # repeats calls that shared a process which was lost
        self._num_apart = 0  # number of such calls
        self._opening = asyncio.Lock()  # guards `_suspects`

    @property
    def at_once(self) -> int:
        """Number of calls that can run at a time."""
        return self._most * self._lanes

    async def __aenter__(self) -> "CallPool":
        await self._grow()
        self._lanes = self._children[0].at_once
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._growing is not None:
            self._growing.cancel()
            await asyncio.gather(self._growing, return_exceptions=True)
        self._num_apart = 0
        await self._end_apart()
        for child in list(self._children):  # calls that end meanwhile forget theirs
            await child.end()

    async def call(self, request: ScoringRequest) -> Outcome:
        """Wait for a free process, call the function for a response, and return its outcome."""
        deaths = 0
        while deaths < LIVES:
            try:
                child = await self._acquire_child()
            except ConfigError as error:  # e.g. the user changed the file meanwhile
                return Outcome(failure=DropReason.REWARD_FAILED, detail=one_line(str(error)))
            alone = child.at_once == 1
            try:
                return await child.call(request, limit_s=self._spec.limit_s)
            except TimeoutError:
                if alone:
                    return self._hung(child)
                log.warning(
                    "%s: a process hung over %s, or over what was beside it", self._name, request.trajectory_id
                )
            except ProcessLostError as error:
                log.warning("%s: %s over %s", self._name, error, request.trajectory_id)
            finally:
                await self._release_child(child)
            if not alone:
                return await self._call_apart(request)
            deaths += 1
        return Outcome(failure=DropReason.REWARD_FAILED, detail=f"its process died {LIVES} times")

    async def _call_apart(self, request: ScoringRequest) -> Outcome:
        """Repeat a call that shared a process which was lost, with fewer calls beside it."""
        self._num_apart += 1
        try:
            async with self._opening:
                if self._suspects is None:
                    lanes = max(1, self._lanes // NARROWER)
                    apart = CallPool(self._spec, name=f"{self._name}-apart", processes=APART, lanes=lanes)
                    self._suspects = await apart.__aenter__()
                suspects = self._suspects
            return await suspects.call(request)
        except ConfigError as error:
            return Outcome(failure=DropReason.REWARD_FAILED, detail=one_line(str(error)))
        finally:
            self._num_apart -= 1
            await self._end_apart()

    async def _end_apart(self) -> None:
        """End the processes for suspect calls once no such call is left."""
        async with self._opening:
            if self._suspects is not None and self._num_apart <= 0:
                suspects, self._suspects = self._suspects, None
                await suspects.__aexit__()

    def _hung(self, child: Child) -> Outcome:
        limit = self._spec.timeout_s
        where = child.hang_place() + ("; an async function must not block" if child.takes_many else "")
        detail = (
            f"no value within {limit:g} s, by reward.timeout_s or its own limit, nor could it be stopped{where}"
        )
        return Outcome(failure=DropReason.REWARD_TIMEOUT, detail=detail, elapsed_s=self._spec.limit_s)

    async def _acquire_child(self) -> Child:
        """Wait for a process with room and reserve it; calls are served in order.

        After `WAIT_S` the pool starts another process. Raises `ConfigError` if there is none and none can start.
        """
        late = asyncio.get_running_loop().time() + WAIT_S
        async with self._turns, self._free:
            while True:
                await self._forget_lost()
                free = [child for child in self._children if child.has_room]
                if free:
                    child = min(free, key=lambda child: child.num_calls)
                    child.num_calls += 1
                    return child
                try:
                    async with asyncio.timeout_at(None if self._is_full else late * bool(self._children)):
                        await self._free.wait()
                except TimeoutError:
                    self._growing = asyncio.create_task(self._grow(), name=f"{self._name}-grows")
                self._look_at_growth()

    def _look_at_growth(self) -> None:
        """Check whether a new process has failed to start.

        Raises its `ConfigError` if there is no other process.
        """
        if self._growing is None or not self._growing.done():
            return
        growing, self._growing = self._growing, None
        try:
            growing.result()
        except ConfigError as error:
            if not self._children:
                raise
            self._grows_at = asyncio.get_running_loop().time() + GROWS_AGAIN_S
            log.warning("%s: no further process: %s", self._name, error)

    @property
    def _is_full(self) -> bool:
        """True if the pool may not start another process now."""
        starting = self._growing is not None and not self._growing.done()
        starting = starting or asyncio.get_running_loop().time() < self._grows_at
        return starting or len(self._children) >= self._most

    async def _grow(self) -> None:
        try:
            child = await Child.start(
                self._spec, name=f"{self._name}-{next(self._numbers)}", log=f"{self._name}.log"
            )
            child.at_once = min(child.at_once, self._lanes)
            self._children.append(child)
        finally:
            async with self._free:
                self._free.notify_all()

    async def _release_child(self, child: Child) -> None:
        """Release a process after a call, and remove it if it is gone."""
        async with self._free:
            child.num_calls -= 1
            await self._forget_lost()
            self._free.notify_all()

    async def _forget_lost(self) -> None:
        """Remove processes that are gone and have no calls, so that others may start in their place."""
        for child in [child for child in self._children if child.is_lost and not child.num_calls]:
            self._children.remove(child)
            await child.end()


def _place_in_stacks(stacks: str) -> str:
    for stack in stacks.split("(most recent call first):"):
        frames: list[tuple[str, str]] = FRAME.findall(stack)
        ours = next((index for index, (file, _) in enumerate(frames) if file.startswith(OWN_FILES)), None)
        if ours:
            own = frames[ours - 1][0]  # the file of what is called
            return next(f" (at {file}:{number})" for file, number in frames[:ours] if file == own)
    return ""
