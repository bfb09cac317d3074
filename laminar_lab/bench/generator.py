"""Load generators: many replicas around emulated engines in one process, and scorers that toss a coin.

`laminar bench control` starts these instead of a run's own processes. A hosted replica is a run's replica: it
writes real segments and has a link of its own. The replicas of a process share its subscriber, the context of its
sockets, and the hashes of weights. Segments are not synced, since one disk stands for the disks of 128 hosts.
Generators yield to the controller, whose host has no generators in a real fleet.
"""

import asyncio
import gc
import os
from functools import lru_cache
from pathlib import Path
from zlib import crc32

from msgspec.structs import replace

from laminar_lab.emulation.backend import open_engine
from laminar_lab.emulation.engine import hash_weights
from laminar_py.config.engine import EngineLaunch
from laminar_py.config.rollout import OnNewWeights
from laminar_py.engines import read_sizes
from laminar_py.records import DropReason
from laminar_py.records.host import SystemClock
from laminar_py.records.pieces import PayloadLostError
from laminar_py.records.scoring import Score, Unscored
from laminar_py.records.weights import PulledVersion
from laminar_py.relay import PeerClient, RelayKeys, Subscriber, peer_sockets
from laminar_py.repack import EngineSpeed
from laminar_py.rollout import Replica, SegmentStore
from laminar_py.runtime.cluster import Cluster, NodeSlot, Process
from laminar_py.runtime.link import ReplicaLink
from laminar_py.runtime.workers import (
    PartActor,
    ReplicaSpec,
    ScorerSpec,
    open_reader,
    read_run_config,
    segments_folder,
)

DELTA_S = 3600.0  # between deltas of a running response, so that nothing goes to journals
LOOK_S = 5.0  # between looks whether a replica has failed
GATHER_S = 0.05  # in which a scorer gathers scores
CALLS = 4096
YOUNG = 50_000  # objects after which the collector looks for cycles
NICE = 5

hash_once = lru_cache(maxsize=2)(hash_weights)


class UnsyncedStore(SegmentStore):
    """Segments without syncs to the disk."""

    async def keep_synced(self) -> None:
        """Wait until cancelled; there is nothing to sync."""
        await asyncio.Event().wait()


class SharedWeights(Subscriber):
    """Weight source that the replicas of this process share. It pulls each version once."""

    def __init__(self, relay: str, *, name: str, keys: RelayKeys) -> None:
        super().__init__(relay, name=name, keys=keys)
        self._pulling = asyncio.Lock()
        self._pulled: PulledVersion | None = None

    async def pull(self, version: int | None = None, *, base: int = -1) -> PulledVersion:
        """Pull that version, or the newest; a version that another replica has just pulled is not pulled again."""
        async with self._pulling:
            wanted = await self.wait_newer(-1) if version is None else version
            if self._pulled is None or self._pulled.version != wanted:
                self._pulled = await super().pull(version, base=base)
            return self._pulled

    def release(self) -> None:
        """Do nothing, since other replicas may read the version."""


class GeneratorActor(PartActor):
    """Hosts replicas."""

    def __init__(self) -> None:
        super().__init__()
        self._replicas: list[Replica] = []

    async def start(self, spec: ReplicaSpec) -> None:
        """Start one more replica; the first opens what all of them share."""
        if not self._replicas:
            os.nice(NICE)
            gc.set_threshold(YOUNG)
            self._config = read_run_config(spec, f"generator-{spec.index}")
            self._weights = SharedWeights(spec.relay, name=f"generator-{spec.index}", keys=spec.keys)
            self._wire = peer_sockets(spec.keys)
            self._reader = open_reader(spec, self._config)
            self._tasks = [asyncio.create_task(self._weights.run(), name="subscriber")]
        rollout = self._config.rollout
        logs = Path(spec.run_dir) / "logs"
        launch = EngineLaunch(model_dir=Path(spec.model_dir), logs=logs, index=spec.index, secret=None)
        replica = Replica(
            spec.index,
            engine=await open_engine(self._config, launch, delta_interval_s=DELTA_S, checksum=hash_once),
            weights=self._weights,
            store=UnsyncedStore(segments_folder(spec), spec.label, self._reader),
            clock=SystemClock(),
            on_new_weights=OnNewWeights(rollout.on_new_weights),
            batch=rollout.batch_per_replica,
            max_batch=rollout.max_batch,
            partial_interval_s=rollout.partial_interval_s,
            initial=spec.assignments,
            gather_s=spec.pace.gather_s,
        )
        client = PeerClient(self._wire, spec.hub, spec.label)
        link = ReplicaLink(client, replica, attach=self._weights.attach, quiet_s=spec.pace.quiet_s)
        self._tasks += [asyncio.create_task(replica.run()), asyncio.create_task(link.run())]
        self._replicas.append(replica)

    async def speed(self) -> EngineSpeed:
        """Measure the first replica."""
        rollout = self._config.rollout
        vocab = read_sizes(self._config.model.path).vocab_size
        sampling = rollout.sampling.params()
        speed, _ = await self._replicas[0].measure_speed(vocab=vocab, max_len=rollout.max_len, sampling=sampling)
        return speed

    async def ended(self) -> None:
        """Never return; raise the error that ended a replica."""
        while True:
            await asyncio.sleep(LOOK_S)
            for task in self._tasks:
                if task.done():
                    task.result()


class HostedReplica:
    """The process of a replica that lives in a generator with others."""

    def __init__(self, generator: Process) -> None:
        self.ready = generator.ready
        self.call = generator.call

    def kill(self) -> None:
        """Do nothing, since other replicas live in the process."""


class GeneratorCluster:
    """The cluster `inner`, but replicas share `num_generators` processes in turn, and scorers toss coins."""

    def __init__(self, inner: Cluster, num_generators: int) -> None:
        self.here = inner.here
        self.nodes = inner.nodes
        self._inner = inner
        self._num_generators = num_generators
        self._generators: list[Process] = []

    def start(self, actor_class: type | str, *, title: str, concurrency: int, place: NodeSlot) -> Process:
        """Start a process; a replica shares a running generator."""
        kind, _, index = title.rpartition("-")
        if kind == "scorer":
            actor_class = CoinScorerActor
        if kind != "replica":
            return self._inner.start(actor_class, title=title, concurrency=concurrency, place=place)
        if len(self._generators) < self._num_generators:
            started = self._inner.start(GeneratorActor, title="generator", concurrency=CALLS, place=place)
            self._generators.append(started)
        return HostedReplica(self._generators[int(index) % self._num_generators])


class CoinScorerActor(PartActor):
    """Hosts a scorer that reads each response and tosses a coin for it."""

    async def start(self, spec: ScorerSpec) -> int:
        """Start; return how many responses it takes at a time."""
        self._reader = open_reader(spec, read_run_config(spec, f"scorer-{spec.index}"))
        self._scores: asyncio.Queue[Score] = asyncio.Queue()
        return 256

    async def reach(self, data: bytes) -> None:
        """Do nothing, since it asks no servers."""

    async def submit_responses(self, responses: list[Unscored]) -> None:
        """Read responses and score them."""
        for response in responses:
            score = Score(trajectory_id=response.id, value=float(crc32(response.id.encode()) & 1))
            try:
                self._reader.load(ref.at for ref in response.tokens)
            except PayloadLostError as error:
                score = replace(score, value=None, failure=DropReason.TOKENS_LOST, detail=str(error))
            self._scores.put_nowait(score)

    async def next_scores(self, wait_s: float) -> list[Score]:
        """Return the scores that are ready, or none after `wait_s` seconds."""
        scores: list[Score] = []
        try:
            async with asyncio.timeout(wait_s):
                scores.append(await self._scores.get())
        except TimeoutError:
            return scores
        await asyncio.sleep(GATHER_S)
        while not self._scores.empty():
            scores.append(self._scores.get_nowait())
        return scores

    async def stop(self) -> None:
        """Return at once, since it holds nothing."""
