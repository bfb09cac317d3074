"""Processes that call one reward function for a scorer, each ended where a call in it hangs.

Invariant (law 6): every call has an outcome. One that was alone in a process which hung or died is to blame for
it; of several nobody can tell, so all of them are called again, with fewer beside each, down to none.
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

GROWS_AGAIN_S = 30.0  # after a process that could not be started
APART = 2  # processes that call suspects again, while there are some
NARROWER = 8  # times fewer of them beside each other
LIVES = 3  # processes that one response may take down before it is given up
START_S = 60.0
GRACE_S = 3.0  # beyond the limit that a process keeps itself
OWN_FILES = str(Path(__file__).parent)
FRAME = re.compile(r'File "(.+)", line (\d+) in ')
WAIT_S = 0.05  # for a process to be free, after which another is started, if there may be more


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpec:
    """Settings of a process that calls a term, e.g. `CallSpec(term=exact, timeout_s=10, folder=logs)`."""

    term: str  # its settings, in JSON
    timeout_s: float  # of a call
    folder: Path  # takes logs
    columns: Sequence[Column] = ()  # wanted besides a value
    env: Mapping[str, str] = field(default_factory=dict)  # variables that it sees beside a few harmless ones
    record: Path | None = None  # folder of the run, below which it may not write
    grace_s: float = GRACE_S

    def start(self, name: str) -> CallStart:
        """Order to the process `name`."""
        return CallStart(
            term=self.term,
            timeout_s=self.timeout_s,
            columns=list(self.columns),
            record=None if self.record is None else str(self.record),
            hang_log=str(self.folder / f"{name}.hangs"),
        )

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the process, beside harmless ones."""
        return {"PYTHONUNBUFFERED": "1", **self.env}

    @property
    def limit_s(self) -> float:
        """Seconds after which a call that is not over hangs."""
        return self.timeout_s + self.grace_s


class Child:
    """A process that calls the function, see `child`."""

    def __init__(self, process: HostedProcess, *, at_once: int, hang_log: Path) -> None:
        self._process = process
        self._hang_log = hang_log
        self.at_once = at_once
        self.takes_many = at_once > 1  # whatever it is given
        self.num_calls = 0

    @classmethod
    async def start(cls, spec: CallSpec, *, name: str, log: str) -> "Child":
        """A process that is ready, with a `log` in the folder.

        Raises `ConfigError` where it has no function, and where it does not start.
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
        except BaseException:  # also where the start is called off
            await process.end()
            raise
        return cls(process, at_once=started.at_once, hang_log=Path(start.hang_log))

    @property
    def is_lost(self) -> bool:
        """True once it takes no more calls."""
        return self._process.is_lost

    @property
    def has_room(self) -> bool:
        """True where it takes another call."""
        return not self.is_lost and self.num_calls < self.at_once

    async def ask(self, request: ScoringRequest, *, limit_s: float) -> Outcome:
        """Outcome of a call. Raises `TimeoutError` where there is none in time, `ProcessLostError` where it died.

        Either way the process is gone then.
        """
        body = await self._process.call(encode(request), limit_s=limit_s)
        try:
            answer = decode(CallAnswer, body)
        except msgspec.DecodeError as error:  # the function wrote it
            self._process.kill("it answered nonsense")
            raise ProcessLostError("it answered nonsense", str(error)) from error
        assert answer.outcome is not None, answer.bug
        return answer.outcome

    def hang_place(self) -> str:
        """The line of the user's own code in which it hung, e.g. " (at rewards.py:7)", or ""."""
        with suppress(OSError):
            return _place(self._hang_log.read_text(errors="replace"))
        return ""

    async def end(self) -> None:
        """End it and all that it has started."""
        await self._process.end()
        self._hang_log.unlink(missing_ok=True)


class CallPool:
    """Processes that call what `spec` says; `async with` starts and ends them.

    There are one process and at most `processes`, each with at most `lanes` calls at once: another wherever a
    call waits. Raises `ConfigError` where the function cannot be had.
    """

    def __init__(self, spec: CallSpec, *, name: str, processes: int = 1, lanes: int = CALLS_AT_ONCE) -> None:
        self._spec = spec
        self._name = name
        self._most = processes
        self._lanes = lanes
        self._children: list[Child] = []
        self._turns = asyncio.Lock()  # only the call that came first waits for a process
        self._free = asyncio.Condition()
        self._growing: asyncio.Task[None] | None = None
        self._grows_at = 0.0  # on the loop's clock: one could not be started, and is not tried again before
        self._numbers = count()
        self._suspects: CallPool | None = None  # calls again what was not alone where it was lost
        self._num_apart = 0  # such calls
        self._opening = asyncio.Lock()  # of `_suspects`

    @property
    def at_once(self) -> int:
        """Calls that it takes up without delay."""
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
        """Outcome of a response, once a process is free for it."""
        deaths = 0
        while deaths < LIVES:
            try:
                child = await self._take()
            except ConfigError as error:  # e.g. as its file was changed meanwhile
                return Outcome(failure=DropReason.REWARD_FAILED, detail=one_line(str(error)))
            alone = child.at_once == 1
            try:
                return await child.ask(request, limit_s=self._spec.limit_s)
            except TimeoutError:
                if alone:
                    return self._hung(child)
                log.warning(
                    "%s: a process hung over %s, or over what was beside it", self._name, request.trajectory_id
                )
            except ProcessLostError as error:
                log.warning("%s: %s over %s", self._name, error, request.trajectory_id)
            finally:
                await self._give(child)
            if not alone:
                return await self._call_apart(request)
            deaths += 1
        return Outcome(failure=DropReason.REWARD_FAILED, detail=f"its process died {LIVES} times")

    async def _call_apart(self, request: ScoringRequest) -> Outcome:
        """Outcome of a response that was not alone in a process which was lost."""
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
        """End the processes for suspects, once there are none."""
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

    async def _take(self) -> Child:
        """A process with room for a call, first come, first served; another is started where that takes a while.

        Raises `ConfigError` where that cannot be.
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
        """Raises `ConfigError` where a process could not be started and there is no other to wait for."""
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
        """True where no other process is to be started, or one is starting."""
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

    async def _give(self, child: Child) -> None:
        """Take the room of a call back; a process that is gone makes room for another."""
        async with self._free:
            child.num_calls -= 1
            await self._forget_lost()
            self._free.notify_all()

    async def _forget_lost(self) -> None:
        """Make room for others in the place of processes that are gone, also of one that died without a call."""
        for child in [child for child in self._children if child.is_lost and not child.num_calls]:
            self._children.remove(child)
            await child.end()


def _place(stacks: str) -> str:
    for stack in stacks.split("(most recent call first):"):
        frames: list[tuple[str, str]] = FRAME.findall(stack)
        ours = next((index for index, (file, _) in enumerate(frames) if file.startswith(OWN_FILES)), None)
        if ours:
            own = frames[ours - 1][0]  # the file of what is called
            return next(f" (at {file}:{number})" for file, number in frames[:ours] if file == own)
    return ""
