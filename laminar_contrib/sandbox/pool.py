"""The pool of sandbox slots that run programs written by a model. Rewards and tools call it.

A program runs in the required tier, in a stronger one, or not at all (law 10). A failing program gives a labelled
result and never raises. Callers compare outputs outside, so no expected value enters a sandbox. No process, folder
or cgroup outlives the pool (`tests/sandbox/test_ends.py`).
"""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from laminar_contrib.sandbox.inside.messages import SandboxLimits
from laminar_contrib.sandbox.inside.program import ProgramPayload
from laminar_contrib.sandbox.interpreter import (
    copy_standard_library,
    is_library_readable_by_others,
    shared_libraries,
)
from laminar_contrib.sandbox.places import SlotPlace, sweep_places
from laminar_contrib.sandbox.records import SandboxError, SandboxLabel, SandboxResult, SandboxTier, TierOffer
from laminar_contrib.sandbox.session import SandboxSession
from laminar_contrib.sandbox.slot import SandboxSlot, pack
from laminar_py.children import ProcessLostError
from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.section import ConfigError

REMEDY = (
    "run as root or where user namespaces, Landlock (Linux 5.13) and seccomp are allowed, or lower it to a tier"
    " that `laminar doctor` shows"
)
SHELL = "/bin/sh"
TRIES_SHELL = f"import subprocess; subprocess.run([{SHELL!r}, '-c', ':'], check=True); print('runs')"
NO_PROGRAMS = ("/", "/dev", "/proc", "/sys", "/tmp")  # private to the host, or replaced in a sandbox
ATTEMPTS = 3  # of a run whose program or zygote was killed although it broke no limit


class SandboxPool:
    """Slots that each run one program at a time.

        async with SandboxPool(slots=2) as pool:
            result = await pool.run("print(int(input()) + 1)", stdin="41")

    The pool uses the strongest tier that this machine offers, or exactly `tier`. Opening it raises `ConfigError`
    if the machine offers only tiers weaker than `require`. `programs` are folders of the host whose files a
    program may execute; they need the tier `namespaces`. A call waits until a slot is idle.
    """

    def __init__(
        self,
        *,
        slots: int,
        require: SandboxTier = SandboxTier.LANDLOCK,
        tier: SandboxTier | None = None,
        limits: SandboxLimits | None = None,
        programs: Sequence[str] = (),
    ) -> None:
        assert slots > 0, slots
        self._number = slots
        self._require = require
        self._candidates = [tier] if tier is not None else list(SandboxTier)
        self._limits = limits or SandboxLimits()
        self._programs = [os.path.realpath(folder) for folder in programs]
        self._has_shell = False
        self._places: list[SlotPlace] = []
        self._slots: list[SandboxSlot] = []
        self._idle = asyncio.PriorityQueue[tuple[bool, int, int]]()  # not ready, -turn, number; as many as slots
        self._turns = itertools.count()
        self._open = False

    @classmethod
    def from_config(cls, config: SandboxConfig) -> "SandboxPool":
        """Make a pool from the section `sandbox` of a config."""
        limits = SandboxLimits(cpu_s=config.cpu_s, wall_s=config.wall_s, memory_bytes=config.memory_mib << 20)
        require = SandboxTier(config.require.value)
        return cls(slots=config.slots, require=require, limits=limits, programs=config.programs)

    @property
    def tier(self) -> SandboxTier:
        """The tier that an open pool uses."""
        return self._slots[0].tier

    @property
    def has_shell(self) -> bool:
        """True if programs can start the shell of this machine."""
        return self._has_shell

    @property
    def weaknesses(self) -> str:
        """How the tier is weaker on this machine than elsewhere, in words; empty if it is not."""
        return self._slots[0].weaknesses

    async def __aenter__(self) -> "SandboxPool":
        """Choose a tier, start all slots, and return the open pool.

        If a slot does not start, all slots are closed and its error is raised.
        """
        try:
            await asyncio.to_thread(self._prepare)
            await self._choose()
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
        files: Mapping[str, bytes] | None = None,
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        """Run a program as a script, with standard input and with `files` in its folder, by name.

        Raises `ValueError` for a name that leads out of the folder, `SandboxError` if the sandbox itself fails.
        """
        return await self._run(ProgramPayload(program=_text(program)), stdin, files, limits)

    async def call(
        self,
        program: str,
        function: str,
        args: Sequence[object],
        *,
        files: Mapping[str, bytes] | None = None,
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        """Run a program and call one of its functions, e.g. "solve", or "Solution.solve" on a new `Solution()`.

        Arguments travel as JSON. The value returns as `value_json`, in which tuples, sets and iterators are lists;
        it is None unless the label is `ok`. The program can forge this value, so compare it outside. Raises as
        `run` does, and `ValueError` for arguments that JSON cannot express.
        """
        try:
            args_json = msgspec.json.encode(list(args)).decode()
        except TypeError as error:
            raise ValueError(f"args={args!r}: give what JSON has a form for") from error
        payload = ProgramPayload(program=_text(program), function=function, args_json=args_json)
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

    def _prepare(self) -> None:
        """Check `programs` and claim a place for each slot.

        Raises `ConfigError`. It blocks: call it in a thread.
        """
        for folder in self._programs:
            if not os.path.isdir(folder):
                raise ConfigError(f"sandbox.programs={folder}: no folder of this machine; name one, such as /usr")
            if any(folder == one or (one != "/" and folder.startswith(f"{one}/")) for one in NO_PROGRAMS):
                raise ConfigError(f"sandbox.programs={folder}: code may not see this; name another, such as /usr")
        sweep_places()
        shared_libraries()
        for _ in range(self._number):
            self._places.append(SlotPlace.claim())

    async def _choose(self) -> None:
        """Make the slots of the strongest tier in which a first slot starts. Raises `ConfigError` if none does."""
        reasons: dict[SandboxTier, SandboxError] = {}
        for tier in self._candidates:
            if tier.strength < self._weakest.strength:
                break
            home = await asyncio.to_thread(self._home, tier)
            self._slots = [
                SandboxSlot(place, tier=tier, home=home, programs=self._programs) for place in self._places
            ]
            try:
                await self._slots[0].start()
                await self._try_programs()
                return
            except SandboxError as error:
                reasons[tier] = error
        why = (
            "; ".join(f"{tier.value}: {reason}" for tier, reason in reasons.items())
            or "a weaker one was asked for"
        )
        refusal = f"sandbox.require={self._require.value}: cannot be had here ({why}); {REMEDY}"
        if self._programs:
            remedy = "run as root or where user namespaces are allowed, or leave it out"
            refusal = (
                f"sandbox.programs: the tier namespaces, which they need, cannot be had here ({why}); {remedy}"
            )
        raise ConfigError(refusal) from next(reversed(reasons.values()), None)

    @property
    def _weakest(self) -> SandboxTier:
        """The weakest tier allowed.

        Host programs need namespaces: Landlock cannot hide packages below their folder.
        """
        return SandboxTier.NAMESPACES if self._programs else self._require

    async def _try_programs(self) -> None:
        """Try to start a shell if the pool has `programs`.

        Raises `ConfigError` if code may start no process here.
        """
        if not self._programs:
            return
        if self._slots[0].alone:
            why = "code may start no process in the sandbox of this machine"
            raise ConfigError(f"sandbox.programs: {why}; run as root, or leave it out")
        with suppress(ProcessLostError):
            tried = await self._slots[0].run(ProgramPayload(program=TRIES_SHELL), limits=self._limits)
            self._has_shell = tried.stdout == "runs\n"

    def _home(self, tier: SandboxTier) -> Path | None:
        """Copy the standard library if the programs' user cannot read the original; None if no copy is needed."""
        place = self._places[0]
        if tier is not SandboxTier.LANDLOCK or not place.users or is_library_readable_by_others():
            return None
        return copy_standard_library(place.folder / "python")

    async def _close(self) -> None:
        self._open = False
        await asyncio.gather(*(slot.close() for slot in self._slots))
        for place in self._places:
            await asyncio.to_thread(place.release)
        self._slots, self._places = [], []


def _text(program: str) -> str:
    """Replace characters that no file can hold, such as half of a surrogate pair."""
    return program.encode("utf-8", "replace").decode()


async def survey_tiers() -> list[TierOffer]:
    """Try every tier, the strongest first; say why this machine does not offer it, or how it is weaker here."""
    return [await _offer(tier) for tier in SandboxTier]


async def _offer(tier: SandboxTier) -> TierOffer:
    try:
        async with SandboxPool(slots=1, require=tier, tier=tier) as pool:
            return TierOffer(tier, True, pool.weaknesses)
    except ConfigError as error:
        return TierOffer(tier, False, str(error.__cause__))  # without field and remedy
