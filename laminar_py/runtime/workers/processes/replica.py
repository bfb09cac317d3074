"""The process of a rollout replica and its engine.

The process stores the measured speed of its engine in `.cache/engine_speed`, by hardware, code and settings.
"""

import asyncio
import contextlib
import inspect
import logging
import os
import platform
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import msgspec

from laminar_py.config.engine import BACKENDS, EngineLaunch
from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.engines.model_sizes import read_sizes
from laminar_py.records.engine import EngineLostError
from laminar_py.records.environment import Environments
from laminar_py.records.host import SystemClock
from laminar_py.relay.sockets import PeerClient, SocketFactory, peer_sockets
from laminar_py.relay.subscriber import Subscriber
from laminar_py.repack.signals import EngineSpeed
from laminar_py.rollout import calibration
from laminar_py.rollout.replica import Replica
from laminar_py.rollout.storing import SegmentStore
from laminar_py.rollout.verifying import Prober
from laminar_py.runtime.cluster.errors import bug_in
from laminar_py.runtime.link.replica_link import ReplicaLink
from laminar_py.runtime.link.turns import RemoteEnvironments
from laminar_py.runtime.workers.processes.base import (
    PartActor,
    has_several_hosts,
    open_reader,
    read_run_config,
    segments_folder,
)
from laminar_py.runtime.workers.specs import ReplicaSpec

CACHE = Path(".cache/engine_speed")
log = logging.getLogger(__name__)

# On a machine that they share the learner goes first: generation runs ahead of it, never the other way round.
REPLICA_NICENESS = 10


class ReplicaActor(PartActor):
    """Hosts a rollout replica and its engine."""

    async def start(self, spec: ReplicaSpec) -> None:
        """Open the engine; make and start the relay subscriber, the replica and the link to the controller."""
        config = read_run_config(spec, f"replica-{spec.index}")
        rollout = config.rollout
        if rollout.engine.yields_cpus:
            os.nice(REPLICA_NICENESS)
        with _unwrapping_bugs(config):
            engine = await BACKENDS.get(rollout.engine.kind).open(config, _launch_of(spec))
        prober = Prober(engine, spec.probes, rollout.sampling.params(), replica=spec.index)
        wire = peer_sockets(spec.keys)

        @cache
        def decode_with() -> Callable[..., str]:  # only stop strings need the tokenizer
            from laminar_py.data.tokenizer import load_tokenizer

            return load_tokenizer(Path(spec.model_dir)).decode

        self._weights = Subscriber(spec.relay, name=f"replica-{spec.index}", keys=spec.keys)
        self._listening = asyncio.create_task(self._weights.run(), name="subscriber")
        self._replica = Replica(
            spec.index,
            engine=engine,
            weights=self._weights,
            store=SegmentStore(
                segments_folder(spec), spec.label, open_reader(spec, config), shared=has_several_hosts(config)
            ),
            clock=SystemClock(),
            on_new_weights=OnNewWeights(rollout.on_new_weights),
            batch=rollout.batch_per_replica,
            max_batch=rollout.max_batch,
            partial_interval_s=rollout.partial_interval_s,
            max_seconds=rollout.max_seconds,
            verify_every=rollout.engine.verify_every,
            prober=prober if spec.probes else None,
            initial=spec.assignments,
            gather_s=spec.pace.gather_s,
            environments=_environments(config, spec, wire),
            decode=lambda ids: decode_with()(ids, special=True),
        )
        self._config = config
        peer, attach = PeerClient(wire, spec.hub, spec.label), self._weights.attach
        link = ReplicaLink(peer, self._replica, attach=attach, quiet_s=spec.pace.quiet_s)
        self._task = asyncio.create_task(self._replica.run(), name="replica")
        self._link = asyncio.create_task(link.run(), name="link")

    async def speed(self) -> EngineSpeed:
        """Return the speed of the engine: known to its backend, stored by an earlier run, or measured now.

        A measured speed is stored if the engine had no other work.
        """
        config = self._config
        rollout = config.rollout
        speed: EngineSpeed | None = BACKENDS.get(rollout.engine.kind).known_speed(config)
        if speed is None:
            path = CACHE / f"{await asyncio.to_thread(speed_key, config)}.json"
            try:
                speed = msgspec.json.decode(path.read_bytes(), type=EngineSpeed)
            except (OSError, msgspec.DecodeError):
                speed, was_idle = await self._replica.measure_speed(
                    vocab=read_sizes(config.model.path).vocab_size,
                    max_len=rollout.max_len,
                    sampling=rollout.sampling.params(),
                )
                if was_idle:
                    _store_speed(path, speed)
        return speed

    async def ended(self) -> None:
        """Wait until the replica, its subscriber or its link ends, log the error, and raise it."""
        tasks = {self._link, self._task, self._listening}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        with _unwrapping_bugs(self._config):
            for task in (self._task, self._listening, self._link):
                if task.done():
                    log.error("%s ended", task.get_name(), exc_info=task.exception())
                    task.result()


def _launch_of(spec: ReplicaSpec) -> EngineLaunch:
    """Return how the replica opens its engine."""
    return EngineLaunch(
        model_dir=Path(spec.model_dir),
        logs=Path(spec.run_dir) / "logs",
        index=spec.index,
        secret=spec.secret,
        server=spec.server,
        shared=spec.shared,
        shared_gpus=spec.shared_gpus,
    )


def _environments(config: RunConfig, spec: ReplicaSpec, wire: SocketFactory) -> Environments | None:
    """Return the replica's environments: in other processes if the config has some, else the engine backend's."""
    if config.environment is None:
        return BACKENDS.get(config.rollout.engine.kind).open_environments(config)
    return RemoteEnvironments(Path(spec.run_dir), config.environment.workers, wire, spec.label)


@contextlib.contextmanager
def _unwrapping_bugs(config: RunConfig) -> Iterator[None]:
    """Raise a bug in this package or a backend as itself, and any other error of the block unchanged.

    A bug may be the cause of an `EngineLostError`, which alone would count as a crash of the engine. The message
    of a bug in an installed backend names its package.
    """
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, EngineLostError) else None
        bug = bug_in(cause or error)
        if bug is None:
            raise
        raise BACKENDS.package_error(config.rollout.engine.kind, bug) from None


def _store_speed(path: Path, speed: EngineSpeed) -> None:
    """Store a measured speed for later starts; a failure is only logged."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(speed))
        partial.rename(path)
    except OSError as error:
        log.warning("%s is not stored: %s", path, error)


def _cpu_name() -> str:
    """Return the model of this host's CPUs, or their architecture where Linux names no model."""
    told = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    return next((line for line in told.splitlines() if line.startswith("model name")), platform.machine())


def speed_key(config: RunConfig) -> str:
    """Return a digest of all that a speed depends on.

    It is of GPUs and CPUs, model, settings, the code of measurement and backend, and the release of torch.
    """
    rollout, backend = config.rollout, BACKENDS.get(config.rollout.engine.kind)
    code = [Path(calibration.__file__), *sorted(Path(inspect.getfile(backend.open)).parent.glob("*.py"))]
    described = (path.read_text() for path in Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = {line for text in described for line in text.splitlines() if line.startswith("Model:")}
    parts = (
        *sorted(models),
        f"{_cpu_name()} {os.cpu_count()} torch {version('torch')}",
        *(path.read_text() for path in code),
        (config.model.path / "config.json").read_text(),
        rollout.engine.model_dump_json(),
        rollout.sampling.model_dump_json(exclude={"max_new_tokens", "temperature"}),
        f"{rollout.record} {rollout.max_batch} {rollout.max_len} {rollout.kv_capacity} {config.learner.lora}",
    )
    return blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
