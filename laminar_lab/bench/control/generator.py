"""Load generators: many emulated replicas in one process, and scorers that read responses and toss a coin.

`bench.control` starts these instead of a run's own parts. A hosted replica is a run's replica around the emulated
engine: it writes real segments and has a link of its own. The replicas of a process share its subscriber, the
context of its sockets, and the hashes of weights. Segments are not synced, since one disk stands for the disks of
128 hosts. The loops of generators yield to the controller, whose host has no generators in a real fleet.
"""

import asyncio
import gc
import os
import time
from functools import lru_cache
from pathlib import Path
from zlib import crc32

from laminar_lab.emulation.backend import open_engine
from laminar_lab.emulation.engine import hash_weights
from laminar_py.config import RunConfig
from laminar_py.config.engine import EngineLaunch
from laminar_py.config.rollout import OnNewWeights
from laminar_py.engines import read_sizes
from laminar_py.ledger.segments import PayloadReader
from laminar_py.records import DropReason
from laminar_py.records.codec import decode, encode
from laminar_py.records.host import SystemClock
from laminar_py.records.pieces import PayloadLostError, Piece, TokensRef
from laminar_py.records.scoring import Score, Unscored
from laminar_py.records.weights import PulledVersion
from laminar_py.relay import PeerClient, RelayKeys, Subscriber, peer_sockets
from laminar_py.rollout import Replica, SegmentStore
from laminar_py.runtime.cluster import Part, Place, Process, cluster
from laminar_py.runtime.link import ReplicaLink
from laminar_py.runtime.workers import PartActor, ReplicaSpec, ScorerSpec, open_folder, open_part, open_reader

ENDED = "ended"  # files in which each generator notes the ends of responses
WRITTEN_S = 0.5
DELTA_S = 3600.0  # between deltas of a running response, so that nothing goes to journals
LOOK_S = 5.0  # between looks whether a replica has failed
CALLS = 4096
YOUNG = 50_000  # objects after which the collector looks for cycles
NICE = 5  # niceness of a generator, which stands for hosts that take no time from the controller

hash_once = lru_cache(maxsize=2)(hash_weights)


class Unsynced(SegmentStore):
    """Segments without syncs to the disk; it notes when each response ended."""

    def __init__(self, folder: Path, part: str, reader: PayloadReader, ended: "Ended") -> None:
        super().__init__(folder, part, reader)
        self._ended = ended

    def keep(self, piece: Piece) -> TokensRef:
        """Write a piece and note its response's end."""
        self._ended.note_end(piece.trajectory_id)
        return super().keep(piece)

    async def keep_synced(self) -> None:
        """Wait until cancelled; there is nothing to sync."""
        await asyncio.Event().wait()


class Ended:
    """Moments at which responses ended, on the clock of this host, written to a file now and then."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        self._lines: list[str] = []
        self._written_s = 0.0

    def note_end(self, trajectory_id: str) -> None:
        """Note that a response ends, or is broken off, now."""
        now = time.monotonic()
        self._lines.append(f"{trajectory_id} {now:.4f}\n")
        if now >= self._written_s + WRITTEN_S:
            self._written_s = now
            self._file.writelines(self._lines)
            self._file.flush()
            self._lines.clear()


class SharedWeights:
    """`WeightSource` that all replicas of a process share, over one subscriber."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        self._pulling = asyncio.Lock()
        self._pulled: PulledVersion | None = None

    async def latest(self) -> int:
        """See `Subscriber.latest`."""
        return await self._subscriber.latest()

    async def wait_newer(self, version: int) -> int:
        """See `Subscriber.wait_newer`."""
        return await self._subscriber.wait_newer(version)

    async def pull(self, version: int | None = None) -> PulledVersion:
        """Pull that version, or the newest; a version that another replica has just pulled is not pulled again."""
        async with self._pulling:
            newest = await self._subscriber.latest()
            wanted = newest if version is None else version
            if self._pulled is None or self._pulled.version != wanted:
                self._pulled = await self._subscriber.pull(version)
            return self._pulled

    def release(self) -> None:
        """Do nothing, since other replicas may read the version."""


class GeneratorActor(PartActor):
    """Shell of a process that hosts replicas."""

    async def start(self, data: bytes) -> None:
        """Start one more replica."""
        spec = decode(ReplicaSpec, data)
        if not hasattr(self, "_config"):
            self._open(spec)
            self._first = await self._replica(self._config, spec)
            replica = self._first
        else:
            replica = await self._replica(self._config, spec)
        link = ReplicaLink(
            PeerClient(self._wire, spec.hub, spec.label),
            spec.label,
            replica,
            attach=self._subscriber.attach,
            quiet_s=spec.pace.quiet_s,
        )
        self._tasks += [asyncio.create_task(replica.run()), asyncio.create_task(link.run())]

    async def speed(self) -> bytes:
        """Measure the first replica; an `EngineSpeed`."""
        rollout = self._config.rollout
        speed, _ = await self._first.measure_speed(
            vocab=read_sizes(self._config.model.path).vocab_size,
            max_len=rollout.max_len,
            sampling=rollout.sampling.params(),
        )
        return encode(speed)

    async def ended(self) -> None:
        """Never return; raise the error that ended a replica."""
        while True:
            await asyncio.sleep(LOOK_S)
            for task in self._tasks:
                if task.done():
                    task.result()

    def _open(self, spec: ReplicaSpec) -> None:
        """Open what the replicas of this process share: config, subscriber, weights, sockets and reader."""
        os.nice(NICE)
        gc.set_threshold(YOUNG)
        self._config = open_part(spec, f"generator-{spec.index}")
        keys = RelayKeys(spec.public_key, spec.secret_key)
        self._subscriber = Subscriber(spec.relay, name=f"generator-{spec.index}", keys=keys)
        self._weights = SharedWeights(self._subscriber)
        self._wire = peer_sockets(keys)
        self._tasks = [asyncio.create_task(self._subscriber.run(), name="subscriber")]
        self._reader = open_reader(spec)
        self._ended = Ended(Path(spec.run_dir) / "logs" / f"{ENDED}-{spec.index}")

    async def _replica(self, config: RunConfig, spec: ReplicaSpec) -> Replica:
        """Make a run's replica around the emulated engine, with unsynced segments."""
        rollout = config.rollout
        logs = Path(spec.run_dir) / "logs"
        launch = EngineLaunch(model_dir=Path(spec.model_dir), logs=logs, index=spec.index, secret=None)
        return Replica(
            spec.index,
            engine=await open_engine(config, launch, delta_interval_s=DELTA_S, checksum=hash_once),
            weights=self._weights,
            store=Unsynced(open_folder(spec), spec.label, self._reader, self._ended),
            clock=SystemClock(),
            on_new_weights=OnNewWeights(rollout.on_new_weights),
            batch=rollout.batch_per_replica,
            max_batch=rollout.max_batch,
            partial_interval_s=rollout.partial_interval_s,
            initial=spec.assignments,
            gather_s=spec.pace.gather_s,
        )


class Hosted(Part):
    """A replica in a generator instead of a process of its own."""

    def __init__(self, name: str, process: Process, *, timeout_s: float, place: Place) -> None:
        self.name = name
        self.place = place
        self._timeout_s = timeout_s
        self._bug = None
        self._process = process

    def kill(self) -> None:
        """Do nothing, since other replicas live in the process."""


class Generators:
    """So many processes; the replicas are dealt out among them in turn."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._actors: list[Process] = []

    def make(
        self, name: str, actor_class: type | str, *, concurrency: int, timeout_s: float, place: Place
    ) -> Part:
        """Make a replica's part with this name."""
        if len(self._actors) < self._count:
            self._actors.append(cluster().start(GeneratorActor, title="generator", concurrency=CALLS, place=place))
        actor = self._actors[int(name.rpartition("-")[2]) % self._count]
        return Hosted(name, actor, timeout_s=timeout_s, place=place)


class ReadingScorerActor(PartActor):
    """Shell of a scorer that reads each response and tosses a coin for it."""

    async def start(self, data: bytes) -> int:
        """Start; return how many responses it takes at a time."""
        spec = decode(ScorerSpec, data)
        open_part(spec, f"scorer-{spec.index}")
        self._reader = open_reader(spec)
        self._scores: asyncio.Queue[Score] = asyncio.Queue()
        return 256

    async def reach(self, data: bytes) -> None:
        """Do nothing, since it asks no servers."""

    async def submit_responses(self, data: bytes) -> None:
        """Read a list of `Unscored`."""
        for one in decode(list[Unscored], data):
            self._scores.put_nowait(self._score(one))

    def _score(self, unscored: Unscored) -> Score:
        try:
            self._reader.load((ref.at for ref in unscored.tokens), stores=unscored.stores)
        except PayloadLostError as error:
            return Score(trajectory_id=unscored.id, value=None, failure=DropReason.HOST_LOST, detail=str(error))
        return Score(trajectory_id=unscored.id, value=float(crc32(unscored.id.encode()) & 1))

    async def next_scores(self, wait_s: float) -> bytes:
        """Return a list of `Score`."""
        scores: list[Score] = []
        try:
            async with asyncio.timeout(wait_s):
                scores.append(await self._scores.get())
        except TimeoutError:
            return encode(scores)
        await asyncio.sleep(0.05)
        while not self._scores.empty():
            scores.append(self._scores.get_nowait())
        return encode(scores)

    async def stop(self) -> None:
        """Return at once, since it holds nothing."""
