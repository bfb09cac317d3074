"""A process that calls a reward function, as the scorer holds it; `child` is what runs in it."""

import asyncio
import os
import re
import sys
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
from laminar_py.reward.calls.protocol import (
    MAX_FRAME_BYTES,
    CallAnswer,
    CallRequest,
    CallStart,
    CallStarted,
    header,
)
from laminar_py.reward.outcome import Outcome

START_S = 60.0
GRACE_S = 3.0  # beyond the limit that a process keeps itself
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
        """Environment of the process."""
        passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        return {**passed_on, "PYTHONUNBUFFERED": "1", **self.env}

    @property
    def limit_s(self) -> float:
        """Seconds after which a call that is not over hangs."""
        return self.timeout_s + self.grace_s


class Child:
    """A process that calls the function, see `child`."""

    def __init__(self, process: asyncio.subprocess.Process, *, hang_log: Path) -> None:
        self._process = process
        self._hang_log = hang_log
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._numbers = count()
        self._reading: asyncio.Task[None] | None = None
        self.at_once = 1
        self.takes_many = False  # whatever it is given
        self.num_calls = 0
        self.is_lost = False

    @classmethod
    async def start(cls, spec: CallSpec, *, name: str, log: str) -> "Child":
        """A process that is ready, with a `log` in the folder.

        Raises `ConfigError` where it has no function, and where it does not start.
        """
        start, log_file = spec.start(name), spec.folder / log
        with log_file.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "laminar_py.reward.calls.child",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env=spec.variables,
                start_new_session=True,
            )
        child = cls(process, hang_log=Path(start.hang_log))
        try:
            started = await child._greeted(start)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"reward: the process of {name} does not start ({error!r}); see {log_file}"
            ) from error
        if started.fault is not None:
            await child.end()
            raise ConfigError(started.fault)
        child.at_once, child.takes_many = started.at_once, started.at_once > 1
        child._reading = asyncio.create_task(child._listen(), name=name)
        return child

    async def _greeted(self, start: CallStart) -> CallStarted:
        """The answer to its order; without one it is ended."""
        try:
            async with asyncio.timeout(START_S):
                self._write(start)
                return decode(CallStarted, await self._read())
        except BaseException:  # also where the start is called off
            await self.end()
            raise

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
            return _place(self._hang_log.read_text(errors="replace"))
        return ""

    async def end(self) -> None:
        """End it and all that it has started."""
        self.is_lost = True
        if self._reading is not None:
            self._reading.cancel()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        await self._process.wait()
        self._hang_log.unlink(missing_ok=True)

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
