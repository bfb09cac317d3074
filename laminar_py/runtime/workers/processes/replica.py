"""The process of a rollout replica and its engine.

It keeps the measured speeds of engines in `.cache/engine_speed`, by all settings that a speed depends on.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from laminar_py.config.engine import BACKENDS, EngineLaunch
from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.engines.model_sizes import read_sizes
from laminar_py.records.engine import EngineLostError
from laminar_py.records.environment import Environments
from laminar_py.records.host import SystemClock
from laminar_py.relay.sockets import PeerClient, RelayKeys, SocketFactory, peer_sockets
from laminar_py.relay.subscriber import Subscriber
from laminar_py.repack.signals import EngineSpeed
from laminar_py.rollout.replica import Replica
from laminar_py.rollout.storing import SegmentStore
from laminar_py.runtime.cluster.errors import bug_in
from laminar_py.runtime.link.replica_link import ReplicaLink
from laminar_py.runtime.link.turns import RemoteEnvironments
from laminar_py.runtime.workers.processes.base import PartActor, open_folder, open_part, open_reader
from laminar_py.runtime.workers.specs import ReplicaSpec

CACHE = Path(".cache/engine_speed")
log = logging.getLogger(__name__)

# On a machine that they share the learner goes first: generation runs ahead of it, never the other way round.
REPLICA_NICENESS = 10


class ReplicaActor(PartActor):
    """Hosts a rollout replica and its engine."""

    async def start(self, spec: ReplicaSpec) -> None:
        """Open the engine; wire relay subscriber, replica and link, and start them."""
        config = open_part(spec, f"replica-{spec.index}")
        rollout = config.rollout
        if rollout.engine.yields_cpus:
            os.nice(REPLICA_NICENESS)
        launch = EngineLaunch(
            model_dir=Path(spec.model_dir),
            logs=Path(spec.run_dir) / "logs",
            index=spec.index,
            secret=spec.secret,
            server=spec.server,
        )
        with _unwrapping_bugs(config):
            engine = await BACKENDS.get(rollout.engine.kind).open(config, launch)
        keys = RelayKeys(spec.public_key, spec.secret_key)
        wire = peer_sockets(keys)
        self._weights = Subscriber(spec.relay, name=f"replica-{spec.index}", keys=keys)
        self._listening = asyncio.create_task(self._weights.run(), name="subscriber")
        self._replica = Replica(
            spec.index,
            engine=engine,
            weights=self._weights,
            store=SegmentStore(open_folder(spec), spec.label, open_reader(spec)),
            clock=SystemClock(),
            on_new_weights=OnNewWeights(rollout.on_new_weights),
            batch=rollout.batch_per_replica,
            max_batch=rollout.max_batch,
            partial_interval_s=rollout.partial_interval_s,
            max_seconds=rollout.max_seconds,
            verify_every=rollout.engine.verify_every,
            initial=spec.assignments,
            gather_s=spec.pace.gather_s,
            environments=_environments(config, spec, wire),
        )
        self._config = config
        peer, attach = PeerClient(wire, spec.hub, spec.label), self._weights.attach
        link = ReplicaLink(peer, spec.label, self._replica, attach=attach, quiet_s=spec.pace.quiet_s)
        self._task = asyncio.create_task(self._replica.run(), name="replica")
        self._link = asyncio.create_task(link.run(), name="link")

    async def speed(self) -> EngineSpeed:
        """Return the speed of the engine, which is measured unless it is known."""
        config = self._config
        vocab = read_sizes(config.model.path).vocab_size

        async def measure() -> Measured:
            sampling = config.rollout.sampling.params()
            max_len = config.rollout.max_len
            return Measured(*await self._replica.measure_speed(vocab=vocab, max_len=max_len, sampling=sampling))

        return await engine_speed(config, measure)

    async def ended(self) -> None:
        """Wait until the replica ends, and raise the error that ended it, once its last report was delivered."""
        tasks = {self._link, self._task, self._listening}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        with _unwrapping_bugs(self._config):
            for task in (self._task, self._listening, self._link):
                if task.done():
                    log.error("%s ended", task.get_name(), exc_info=task.exception())
                    task.result()


def _environments(config: RunConfig, spec: ReplicaSpec, wire: SocketFactory) -> Environments | None:
    """Return the environments of this replica: in processes of their own, or the backend's in this process."""
    if config.environment is None:
        return BACKENDS.get(config.rollout.engine.kind).open_environments(config)
    return RemoteEnvironments(Path(spec.run_dir), config.environment.workers, wire, spec.label)


@contextlib.contextmanager
def _unwrapping_bugs(config: RunConfig) -> Iterator[None]:
    """Raise the bug behind an error of the block as itself, and any other error unchanged.

    A bug in the engine arrives as the cause of an `EngineLostError`, which would count as a crash of the engine.
    The message of a bug in an installed backend names its package.
    """
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, EngineLostError) else None
        bug = bug_in(cause or error)
        if bug is None:
            raise
        raise BACKENDS.package_error(config.rollout.engine.kind, bug) from None


# ---- speed of the engine


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured speed; it is stored only if the engine had no other work."""

    speed: EngineSpeed
    alone: bool


async def engine_speed(config: RunConfig, measure: Callable[[], Awaitable[Measured]]) -> EngineSpeed:
    """Return the speed of an engine on this host: known to its backend, stored, or measured now.

    `repack.roofline_batch` overrides the measured batch.
    """
    known: EngineSpeed | None = BACKENDS.get(config.rollout.engine.kind).known_speed(config)
    speed = known or await _measured(config, measure)
    return speed.with_roofline(config.repack.roofline_batch)


async def _measured(config: RunConfig, measure: Callable[[], Awaitable[Measured]]) -> EngineSpeed:
    path = CACHE / f"{await asyncio.to_thread(_key, config)}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineSpeed)
    except (OSError, msgspec.DecodeError):
        measured = await measure()
    if measured.alone:
        _keep(path, measured.speed)
    return measured.speed


def _keep(path: Path, speed: EngineSpeed) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(speed))
        partial.rename(path)
    except OSError as error:
        log.warning("%s is not kept: %s", path, error)


def _key(config: RunConfig) -> str:
    rollout = config.rollout
    sizes = f"{rollout.max_batch} {rollout.max_len} {rollout.kv_capacity}"
    model = (config.model.path / "config.json").read_text()
    drawn = f"{rollout.sampling.model_dump_json()} {rollout.record}"
    parts = (rollout.engine.model_dump_json(), sizes, drawn, model, _device(config))
    return blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def _device(config: RunConfig) -> str:
    """Return the name of the GPU or CPU that the engine runs on."""
    if config.rollout.engine.gpus:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return "cuda"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return f"{[line for line in lines if line.startswith('model name')][:1]} {len(lines)}"
