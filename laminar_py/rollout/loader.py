"""Loads of new weights into a replica's engine, by changed positions or as a whole, and their checks.

`Replica` calls it and holds no request in the engine meanwhile. Under each `on_new_weights` a load is the same:

    pull against the served version --changes--> engine.check_changes --refused--+
           |                                        |                            v
           |                              engine.load_changes ----refused--> pull the whole folder
           |                                        |                            |
           |                                        +-- every `verify_every` -->-+
           +--whole folder--> engine.load_weights <------------------------------+

Where trajectories generate meanwhile (`swap`), the engine stands still for the last two calls alone.
A verified load by changes is followed by a whole load of the same version, which must leave the same hashes.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from laminar_py.config.rollout import OnNewWeights
from laminar_py.records.engine import CheckedChanges, InferenceEngine, PauseMode, RefusedError
from laminar_py.records.events import VersionLoaded
from laminar_py.records.proofs import WeightsChecksum
from laminar_py.records.weights import PulledVersion, VersionLostError, WeightSource
from laminar_py.rollout.outbox import Outbox
from laminar_py.rollout.streams import Streams
from laminar_py.rollout.verifying import Prober, TensorWatch, differing

PAUSES = {OnNewWeights.RETRACT: PauseMode.RETRACT, OnNewWeights.IN_PLACE: PauseMode.IN_PLACE}
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A pulled version, ready to load: its checked changes, or its folder."""

    pulled: PulledVersion
    changes: CheckedChanges | None = None
    refused: bool = False  # the engine refused its changes


class WeightLoader:
    """Loads versions from `weights` into `engine`; reports the hash of every `verify_every`-th (0: of none)."""

    def __init__(
        self,
        engine: InferenceEngine,
        weights: WeightSource,
        streams: Streams,
        out: Outbox,
        verify_every: int,
        prober: Prober | None,
    ) -> None:
        self.version = -1  # that the engine serves; -1 before the first load
        self._engine = engine
        self._weights = weights
        self._streams = streams
        self._out = out
        self._verify_every = verify_every
        self._next_verified = 0  # the first version from here on is hashed
        self._tensors = TensorWatch()
        self._prober = prober
        self._probing: asyncio.Task[None] | None = None

    async def load(self, version: int | None) -> None:
        """Pull and load a version, or the newest for None, while no request runs.

        Raises `VersionLostError` if no relay has a version that was asked for by number.
        """
        began = self._out.clock.now()
        self._streams.serving.clear()
        try:
            await self._install(await self._check(await self._pull(version)), began)
        except VersionLostError as error:
            if self.version >= 0:
                self._streams.serving.set()
            if version is not None or self.version < 0:
                raise
            self._note_kept(error)
            return
        self._begin_probe()

    async def swap(self, policy: OnNewWeights, *, may_swap: Callable[[], bool]) -> None:
        """Pull the newest version while trajectories generate; then pause them as `policy` says, load, and resume.

        If `may_swap()` is false after the pull or the check, the engine keeps its version.
        """
        began = self._out.clock.now()
        try:
            pulled = await self._pull(None)
            if not may_swap():
                return  # a trajectory that arrived during the pull needs the present version
            ready = await self._check(pulled)
        except VersionLostError as error:
            self._note_kept(error)
            return
        if not may_swap():
            return
        self._streams.serving.clear()
        interrupted = await self._streams.interrupt() if policy is OnNewWeights.RESUME else []
        if policy is not OnNewWeights.RESUME:
            await self._engine.pause(PAUSES[policy])
        try:
            await self._install(ready, began)
        except VersionLostError as error:
            self._note_kept(error)
            self._streams.serving.set()
        await self._engine.resume()
        self._streams.resume_interrupted(interrupted)
        self._out.urgent.set()
        self._begin_probe()

    def _note_kept(self, error: VersionLostError) -> None:
        log.warning("replica %d keeps version %d: %s", self._out.index, self.version, error)

    def _begin_probe(self) -> None:
        """Ask the engine the run's probes beside its other work."""
        if self._prober is not None:
            self._probing = asyncio.create_task(self._probe(self._prober), name="probe")

    async def _probe(self, prober: Prober) -> None:
        """Report the engine's answers."""
        found = await prober.answers(self.version)  # a report may leave meanwhile
        self._out.probes += found
        self._out.urgent.set()

    async def finish_probe(self) -> None:
        """Wait until the probes that are under way have ended."""
        if self._probing is not None:
            await asyncio.wait([self._probing])

    async def end_probe(self) -> None:
        """Cancel the probes that are under way, and wait until their requests have ended."""
        if self._probing is not None:
            self._probing.cancel()
            await self.finish_probe()

    async def _pull(self, version: int | None) -> PulledVersion:
        """Pull a version, as changes of the served version where the host and the engine can.

        Where every version is verified, and so loaded whole, changes would only add to it. Raises
        `VersionLostError` also if the host has no newer version than the engine: it announces a version before it
        has proven the folder, and may then give the folder up.
        """
        takes_changes = self._engine.takes_changes and self._verify_every != 1
        pulled = await self._weights.pull(version, base=self.version if takes_changes else -1)
        if pulled.version <= self.version:
            raise VersionLostError(f"the newest version of this host is {pulled.version}")
        return pulled

    async def _pull_folder(self, version: int) -> PulledVersion:
        """Pull the proven folder of a version whose changes were pulled before.

        Raises `VersionLostError`, also if the relay gave the version up meanwhile.
        """
        try:
            return await self._weights.pull(version)
        except RuntimeError as error:
            raise VersionLostError(str(error)) from error

    async def _check(self, pulled: PulledVersion) -> _Ready:
        """Check the changes of a version, if it has any. If they do not fit, warn and pull its folder.

        Raises `VersionLostError` if the folder is gone.
        """
        if not pulled.changes:
            return _Ready(pulled)
        try:
            changes = await self._engine.check_changes([Path(file) for file in pulled.changes], pulled.version)
        except RefusedError as error:
            return _Ready(await self._pull_refused(pulled.version, error), refused=True)
        return _Ready(pulled, changes)

    async def _pull_refused(self, version: int, error: RefusedError) -> PulledVersion:
        """Pull the folder of a version whose changes were refused."""
        log.warning("replica %d loads the whole version %d: %s", self._out.index, version, error)
        return await self._pull_folder(version)

    async def _install(self, ready: _Ready, began: float) -> None:
        """Load a version, let requests enter the engine, and report the load with its time since `began`.

        Among each `_verify_every` consecutive versions, the first that is loaded is hashed. Raises
        `VersionLostError`, with the old weights in place, if changes are refused and the folder is gone.
        """
        await self.end_probe()
        pulled = ready.pulled
        base = await self._apply(ready)
        fell_back = base is None and (ready.refused or ready.changes is not None)
        found: WeightsChecksum | None = None
        stale: tuple[str, ...] = ()
        if self._verify_every and (fell_back or pulled.version >= self._next_verified):
            found, stale = await self._verify(pulled, base)
        self.version = pulled.version
        self._streams.serving.set()
        elapsed = self._out.clock.now() - began
        self._out.loads.append(
            VersionLoaded(
                replica=self._out.index,
                version=pulled.version,
                digest=pulled.digest,
                elapsed_s=elapsed,
                base=base,
                checksum=(found.total or None) if found is not None else None,
                quantized=found is not None and found.quantized,
                stale=stale,
            )
        )
        how = "" if base is None else f" by changes since version {base}"
        log.info("replica %d serves version %d%s after %.3f s", self._out.index, pulled.version, how, elapsed)

    async def _apply(self, ready: _Ready) -> int | None:
        """Have the engine apply the checked changes of a version, or else load its folder.

        Returns the version that was changed; None after a whole load.
        """
        pulled = ready.pulled
        if ready.changes is not None:
            try:
                await self._engine.load_changes(ready.changes)
            except RefusedError as error:
                pulled = await self._pull_refused(pulled.version, error)
            else:
                return ready.changes.base
        await self._engine.load_weights(Path(pulled.path), pulled.version)
        return None

    async def _verify(
        self, pulled: PulledVersion, base: int | None
    ) -> tuple[WeightsChecksum | None, tuple[str, ...]]:
        """Hash the engine's tensors. Returns the hashes and the tensors that did not follow the files.

        After changes since `base` it loads the whole version, too, and compares. If the folder is gone, the next
        load is verified.
        """
        found = await self._engine.checksum()
        wrong: tuple[str, ...] = ()
        if base is not None:
            changed = found
            try:
                pulled = await self._pull_folder(pulled.version)
            except VersionLostError as error:
                log.warning("replica %d verifies the next version: %s", self._out.index, error)
                return None, ()
            await self._engine.load_weights(Path(pulled.path), pulled.version)
            found = await self._engine.checksum()
            wrong = differing(changed, found)
        stale = await self._tensors.stale(Path(pulled.path), found)
        self._next_verified = (pulled.version // self._verify_every + 1) * self._verify_every
        return found, tuple(dict.fromkeys((*wrong, *stale)))
