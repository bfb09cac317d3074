"""The pool of sandbox slots that run programs written by a model. Rewards and tools call it.

A program runs behind the required fences or not at all (law 10). A failing program gives a labelled result and
never raises. Callers compare outputs outside, so no expected value enters a sandbox. No process and no folder
outlives the pool (`tests/sandbox/test_ends.py`).
"""

import asyncio
import itertools
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from laminar_contrib.sandbox.inside.messages import SandboxLimits
from laminar_contrib.sandbox.inside.program import ProgramPayload
from laminar_contrib.sandbox.records import SandboxError, SandboxLabel, SandboxResult, SandboxTier
from laminar_contrib.sandbox.session import SandboxSession
from laminar_contrib.sandbox.slot import SandboxSlot, pack
from laminar_py.children import ProcessLostError
from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.section import ConfigError

REMEDY = "allow Landlock (Linux 5.13) and seccomp, or set sandbox.require to none on a machine without secrets"
ATTEMPTS = 3  # of a run whose program or zygote was killed although it broke no limit


class SandboxPool:
    """Slots that each run one program at a time.

        async with SandboxPool(slots=2) as pool:
            result = await pool.run("print(int(input()) + 1)", stdin="41")

    Opening the pool raises `ConfigError` if this machine has no fences of the tier `require`. With the tier `none`
    the pool uses fences where the machine has them. A call waits until a slot is idle.
    """

    def __init__(
        self,
        *,
        slots: int,
        require: SandboxTier = SandboxTier.LANDLOCK,
        limits: SandboxLimits | None = None,
    ) -> None:
        assert slots > 0, slots
        self._number = slots
        self._require = require
        self._limits = limits or SandboxLimits()
        self._folder: Path | None = None
        self._slots: list[SandboxSlot] = []
        self._idle = asyncio.PriorityQueue[tuple[bool, int, int]]()  # not ready, -turn, number; as many as slots
        self._turns = itertools.count()
        self._open = False

    @classmethod
    def from_config(cls, config: SandboxConfig) -> "SandboxPool":
        """Make a pool from the section `sandbox` of a config."""
        limits = SandboxLimits(cpu_s=config.cpu_s, wall_s=config.wall_s, memory_bytes=config.memory_mib << 20)
        return cls(slots=config.slots, require=SandboxTier(config.require.value), limits=limits)

    @property
    def tier(self) -> SandboxTier:
        """The tier that an open pool uses."""
        return self._slots[0].tier

    async def __aenter__(self) -> "SandboxPool":
        """Choose a tier, start all slots, and return the open pool.

        If a slot does not start, all slots are closed and its error is raised.
        """
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="laminar-sandbox-"))
            await self._choose(self._folder)
            started = await asyncio.gather(*(slot.start() for slot in self._slots[1:]), return_exceptions=True)
            for error in started:
                if isinstance(error, BaseException):
                    raise error
        except BaseException:
            await self._close()
            raise
        for number in reversed(range(len(self._slots))):
            self._release_slot(number)
        self._open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._close()

    async def run(
        self,
        program: str,
        *,
        stdin: str | bytes = b"",
        preamble: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        """Run a program as a script, with standard input and with `files` in its folder, by name.

        `preamble` is code that runs before it in its namespace, such as helper functions that its prompt gave.
        Raises `ValueError` for a name that leads out of the folder, `SandboxError` if the sandbox itself fails.
        """
        payload = ProgramPayload(program=_text(program), preamble=preamble)
        return await self._run(payload, stdin, files, limits)

    async def call(
        self,
        program: str,
        function: str,
        args: Sequence[object],
        *,
        preamble: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        """Run a program and call one of its functions, e.g. "solve", or "Solution.solve" on a new `Solution()`.

        `preamble` as in `run`. Arguments travel as JSON. The value returns as `value_json`, in which tuples and
        iterators are lists; a set {9, 10} is `{"a set of": [10, 9]}`. It is None unless the label is `ok`. The
        program can forge this value, so compare it outside. Raises as `run` does, and `ValueError` for arguments
        that JSON cannot express.
        """
        try:
            args_json = msgspec.json.encode(list(args)).decode()
        except TypeError as error:
            raise ValueError(
                f"args={args!r}: JSON cannot express them; give numbers, texts, lists and objects"
            ) from error
        payload = ProgramPayload(program=_text(program), preamble=preamble, function=function, args_json=args_json)
        return await self._run(payload, b"", files, limits)

    @asynccontextmanager
    async def session(
        self, *, files: Mapping[str, bytes] | None = None, limits: SandboxLimits | None = None
    ) -> AsyncIterator[SandboxSession]:
        """Hold a slot for a session until the `async with` ends; pieces of code share its variables."""
        packed = pack(ProgramPayload(program=""), files or {})
        async with self._slot() as slot:
            session = SandboxSession(slot, packed=packed, limits=limits or self._limits)
            try:
                yield session
            finally:
                await session.close()

    async def _run(
        self,
        payload: ProgramPayload,
        stdin: str | bytes,
        files: Mapping[str, bytes] | None,
        limits: SandboxLimits | None,
    ) -> SandboxResult:
        """Run a program in a free slot, and again if its sandbox crashed or a SIGKILL ended it.

        After `ATTEMPTS` such runs the result is a crash. The kernel may have sent the SIGKILL for want of memory,
        so one SIGKILL does not count as the program's own fault.
        """
        packed = pack(payload, files or {})
        given = stdin.encode("utf-8", "replace") if isinstance(stdin, str) else stdin
        detail = f"its sandbox was ended with it, {ATTEMPTS} times"
        killed = SandboxResult(label=SandboxLabel.CRASH, detail=detail, exit_code=-signal.SIGKILL)
        limits = limits or self._limits
        for attempt in range(ATTEMPTS):
            async with self._slot() as slot:
                try:
                    result = await slot.run(payload, limits=limits, stdin=given, packed=packed)
                except ProcessLostError:
                    slot.abandon()
                    continue
            if result.label is not SandboxLabel.CRASH or result.exit_code != -signal.SIGKILL:
                return result
            killed = result
            if attempt and result.elapsed_s > limits.wall_s / 2:  # a third attempt would hold the slot too long
                break
        return killed

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[SandboxSlot]:
        """Wait for an idle slot and start its zygote if it has none.

        An exception in the body abandons the zygote.
        """
        _, _, number = await self._idle.get()
        try:
            if not self._open:
                raise SandboxError("the pool is closed")
            slot = self._slots[number]
            if not slot.ready:
                await slot.start()
            yield slot
        except BaseException:
            if self._open:
                self._slots[number].abandon()
            raise
        finally:
            self._release_slot(number)

    def _release_slot(self, number: int) -> None:
        """Put a slot back into the queue: the last used one is first, those without a zygote are last."""
        cold = self._open and not self._slots[number].ready
        self._idle.put_nowait((cold, -next(self._turns), number))

    async def _choose(self, folder: Path) -> None:
        """Make the slots of the strongest tier in which a first slot starts. Raises `ConfigError` if none does."""
        for tier in SandboxTier:
            self._slots = [SandboxSlot(folder, f"{number}", tier=tier) for number in range(self._number)]
            try:
                await self._slots[0].start()
                break
            except SandboxError as error:
                if tier is self._require:
                    text = f"sandbox.require={tier.value}: this machine does not offer it ({error}); {REMEDY}"
                    raise ConfigError(text) from error

    async def _close(self) -> None:
        self._open = False
        await asyncio.gather(*(slot.close() for slot in self._slots))
        self._slots = []
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


def _text(program: str) -> str:
    """Replace characters that no file can hold, such as half of a surrogate pair."""
    return program.encode("utf-8", "replace").decode()
