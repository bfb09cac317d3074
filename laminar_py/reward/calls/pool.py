"""Processes that call one reward function for a scorer, each ended where a call in it hangs.

Invariant (law 6): every call has an outcome. One that was alone in a process which hung or died is to blame for
it; of several nobody can tell, so all of them are called again, with fewer beside each, down to none.
"""

import asyncio
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import msgspec

from laminar_py.config.section import ConfigError
from laminar_py.records.codec import decode, encode
from laminar_py.records.columns import Column
from laminar_py.records.scoring import ScoringRequest
from laminar_py.records.trajectory import DropReason
from laminar_py.reward.calls.limited import CALLS_AT_ONCE
from laminar_py.reward.calls.protocol import (
    MAX_FRAME_BYTES,
    CallAnswer,
    CallRequest,
    CallStart,
    CallStarted,
    header,
)
from laminar_py.reward.outcome import Outcome, one_line

log = logging.getLogger(__name__)

START_S = 60.0
GRACE_S = 3.0  # beyond the limit that a process keeps itself
GROWS_AGAIN_S = 30.0  # after a process that could not be started
APART = 4  # processes that call suspects again
NARROWER = 8  # times fewer of them beside each other
LIVES = 3  # processes that one response may take down before it is given up
WAIT_S = 0.05  # for a process to be free, after which another is started, if there may be more
OWN_FILES = str(Path(__file__).parent)
FRAME = re.compile(r'File "(.+)", line (\d+) in ')
PASSED_ON = (
    "PATH",
    "LD_LIBRARY_PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "OMP_NUM_THREADS",
)


class ChildLostError(Exception):
    """A process died, or was ended as a call in it hung."""


class CallPool:
    """Calls of the term whose settings are `term`, in JSON; `async with` starts and ends its processes.

    `env` are variables that they see beside a few harmless ones, `folder` takes their logs, and below `record`
    they may not write. There are one process and at most `processes`: one more wherever a call waits. Raises
    `ConfigError` where the function cannot be had.
    """

    def __init__(
        self,
        term: str,
        *,
        name: str,
        timeout_s: float,
        folder: Path,
        columns: Sequence[Column] = (),
        processes: int = 1,
        env: Mapping[str, str] | None = None,
        record: Path | None = None,
        grace_s: float = GRACE_S,
        lanes: int = CALLS_AT_ONCE,
    ) -> None:
        self._narrower = partial(
            CallPool,
            term,
            timeout_s=timeout_s,
            folder=folder,
            columns=columns,
            processes=APART,
            env=env,
            record=record,
            grace_s=grace_s,
        )
        self._start = CallStart(
            term=term,
            timeout_s=timeout_s,
            columns=list(columns),
            record=None if record is None else str(record),
            hang_log="",
        )
        self._name = name
        self._folder = folder
        self._most = processes
        passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        self._env = {**passed_on, "PYTHONUNBUFFERED": "1", **(env or {})}
        self._limit_s = timeout_s + grace_s
        self._children: list[Child] = []
        self._turns = asyncio.Lock()  # only the call that came first waits for a process
        self._free = asyncio.Condition()
        self._growing: asyncio.Task[None] | None = None
        self._grows_at = 0.0  # on the loop's clock: one could not be started, and is not tried again before
        self._numbers = count()
        self._lanes = lanes  # calls at once in a process, at most
        self._suspects: CallPool | None = None  # calls again what was not alone where it was lost
        self._opening = asyncio.Lock()

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
        if self._suspects is not None:
            await self._suspects.__aexit__(*exc)
        for child in self._children:
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
                return await child.ask(request, limit_s=self._limit_s)
            except TimeoutError:
                if alone:
                    return self._hung(child)
            except ChildLostError as error:
                log.warning("%s: %s over %s", self._name, error, request.trajectory_id)
            finally:
                await self._give(child)
            if not alone:
                return await self._call_apart(request)
            deaths += 1
        return Outcome(failure=DropReason.REWARD_FAILED, detail=f"its process died {LIVES} times")

    async def _call_apart(self, request: ScoringRequest) -> Outcome:
        """Outcome of a response that was not alone in a process which was lost."""
        try:
            async with self._opening:
                if self._suspects is None:
                    lanes = max(1, self._lanes // NARROWER)
                    self._suspects = await self._narrower(name=f"{self._name}-apart", lanes=lanes).__aenter__()
        except ConfigError as error:
            return Outcome(failure=DropReason.REWARD_FAILED, detail=one_line(str(error)))
        return await self._suspects.call(request)

    def _hung(self, child: "Child") -> Outcome:
        limit = self._start.timeout_s
        where = child.hang_place() + ("; an async function must not block" if child.takes_many else "")
        detail = (
            f"no value within {limit:g} s, by reward.timeout_s or its own limit, nor could it be stopped{where}"
        )
        return Outcome(failure=DropReason.REWARD_TIMEOUT, detail=detail, elapsed_s=self._limit_s)

    async def _take(self) -> "Child":
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
            child = await self._started(f"{self._name}-{next(self._numbers)}")
            self._children.append(child)
        finally:
            async with self._free:
                self._free.notify_all()

    async def _give(self, child: "Child") -> None:
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

    async def _started(self, name: str) -> "Child":
        start = msgspec.structs.replace(self._start, hang_log=str(self._folder / f"{name}.hangs"))
        child = await Child.start(name, start, env=self._env, log=self._folder / f"{self._name}.log")
        child.at_once = min(child.at_once, self._lanes)
        return child


class Child:
    """A process that calls the function, see `child`."""

    def __init__(self, process: asyncio.subprocess.Process, start: CallStart) -> None:
        self._process = process
        self._start = start
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._numbers = count()
        self._reading: asyncio.Task[None] | None = None
        self.at_once = 1
        self.takes_many = False  # whatever it is given
        self.num_calls = 0
        self.is_lost = False

    @classmethod
    async def start(cls, name: str, start: CallStart, *, env: Mapping[str, str], log: Path) -> "Child":
        """A process that is ready. Raises `ConfigError` where it has no function, and where it does not start."""
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "laminar_py.reward.calls.child",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env=dict(env),
                start_new_session=True,
            )
        child = cls(process, start)
        try:
            async with asyncio.timeout(START_S):
                child._write(start)
                started = decode(CallStarted, await child._read())
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            await child.end()
            raise ConfigError(f"reward: the process of {name} does not start ({error!r}); see {log}") from error
        if started.fault is not None:
            await child.end()
            raise ConfigError(started.fault)
        child.at_once, child.takes_many = started.at_once, started.at_once > 1
        child._reading = asyncio.create_task(child._listen(), name=name)
        return child

    @property
    def has_room(self) -> bool:
        """True where it takes another call."""
        return not self.is_lost and self.num_calls < self.at_once

    async def ask(self, request: ScoringRequest, *, limit_s: float) -> Outcome:
        """Outcome of a call. Raises `TimeoutError` where there is none in time, `ChildLostError` where it died.

        Either way the process is gone then.
        """
        number = next(self._numbers)
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._write(CallRequest(number, request))
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            self._lose("it hung")
            raise
        except ConnectionError as error:
            self._lose("it died")
            raise ChildLostError("it died") from error
        finally:
            self._waiting.pop(number, None)

    def hang_place(self) -> str:
        """The line of the user's own code in which it hung, e.g. " (at rewards.py:7)", or ""."""
        with suppress(OSError):
            return _place(Path(self._start.hang_log).read_text(errors="replace"))
        return ""

    async def end(self) -> None:
        """End it and all that it has started."""
        self.is_lost = True
        if self._reading is not None:
            self._reading.cancel()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        await self._process.wait()
        with suppress(FileNotFoundError):
            os.unlink(self._start.hang_log)

    async def _listen(self) -> None:
        try:
            while True:
                answer = decode(CallAnswer, await self._read())
                waiting = self._waiting.get(answer.number)
                if waiting is None or waiting.done():
                    continue
                if answer.outcome is None:
                    waiting.set_exception(AssertionError(answer.bug))
                else:
                    waiting.set_result(answer.outcome)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            self._lose("it died")

    def _lose(self, why: str) -> None:
        self.is_lost = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ChildLostError(why))

    def _write(self, record: object) -> None:
        assert self._process.stdin is not None, "it was started with a pipe"
        body = encode(record)
        self._process.stdin.write(header.pack(len(body)) + body)

    async def _read(self) -> bytes:
        assert self._process.stdout is not None, "it was started with a pipe"
        (size,) = header.unpack(await self._process.stdout.readexactly(header.size))
        if size > MAX_FRAME_BYTES:
            raise ConnectionError(f"an answer of {size} bytes")
        return await self._process.stdout.readexactly(size)


def _place(stacks: str) -> str:
    for stack in stacks.split("(most recent call first):"):
        frames: list[tuple[str, str]] = FRAME.findall(stack)
        ours = next((index for index, (file, _) in enumerate(frames) if file.startswith(OWN_FILES)), None)
        if ours:
            own = frames[ours - 1][0]  # the file of what is called
            return next(f" (at {file}:{number})" for file, number in frames[:ours] if file == own)
    return ""
