"""The process of one rank of the learner: its model, optimizer and checkpoints, and its share of a publish.

Called by `workers.learner`. Every rank makes every call, in the same order, since each is a collective.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors import safe_open

from laminar_py.config.cluster import Device
from laminar_py.config.data import ModelConfig
from laminar_py.config.engine import BACKENDS, LearnerStandIn
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.config.warm_start import WARM_STARTS
from laminar_py.engines.local import fp8
from laminar_py.engines.model_sizes import read_sizes, served_dtype
from laminar_py.engines.sglang.scoring import ServedModel
from laminar_py.learner.distributed import COMPUTES_S, STANDS_S, group_of, join_group
from laminar_py.learner.losses.objectives import try_objective
from laminar_py.learner.packing.packer import Bundle, microbatches
from laminar_py.learner.reference import FrozenModel
from laminar_py.learner.rounding import Rounding
from laminar_py.learner.step import Learner
from laminar_py.ledger.segments.reader import PayloadReader, complete_all
from laminar_py.records.codec import IntArray
from laminar_py.records.columns import MODEL_COLUMNS, Source, token_values
from laminar_py.records.metrics import LearnerProgress, LearnerStarted, RankPosition
from laminar_py.records.pieces import ColumnPiece, ColumnRef
from laminar_py.records.proofs import NextToken
from laminar_py.records.weights import Published, Rows, StoredTensor, TensorSource
from laminar_py.relay.mapped_file import allow_many_files
from laminar_py.relay.messages import Manifest
from laminar_py.relay.publisher import Publisher
from laminar_py.relay.remote_writers import RemotePublisher
from laminar_py.relay.stored_version import MANIFEST
from laminar_py.relay.version_store import complete_versions, folder_name
from laminar_py.runtime.preflight.inputs import initial_folder
from laminar_py.runtime.workers.processes.base import (
    ComputingActor,
    PartActor,
    compute_on,
    learner_threads,
    on_compute_thread,
    open_reader,
    open_writer,
    read_run_config,
)
from laminar_py.runtime.workers.specs import (
    FetchRequest,
    FrozenAnswer,
    FrozenRequest,
    FrozenSpec,
    LearnerSpec,
    StepOutcome,
    StepRequest,
    WeightsSpec,
)

VERSION = 0  # of all weights that are evaluated, also where an evaluation is resumed


IDLE = "idle"
ALONE = RankPosition(IDLE, math.inf, 0, 0)  # of a learner that a backend brings
LOADING = LearnerProgress("loading the model", 0, 1, 0.0)


class LearnerActor(ComputingActor):
    """Hosts a rank of the learner, and its publisher if it writes. Calls that only wait can run beside a step."""

    def __init__(self) -> None:
        super().__init__()
        self._progress = LOADING
        self._bundles: list[Bundle] = []  # of the next step
        self._learner: Learner | LearnerStandIn
        self._publisher: Publisher | RemotePublisher | None = None  # of rank 0, and of ranks that publish with it
        self._adapter: bytes | None = None  # config of adapters
        self._probes: list[IntArray] = []
        self._next_tokens: dict[int, list[NextToken]] = {}  # of the newest version
        self._shares_gpus = False  # with replicas, which compute once the learner's turn ends

    def progress(self) -> LearnerProgress:
        """Return how far `start` is."""
        return self._progress

    def position(self) -> RankPosition:
        """Return what this rank does; its compute thread, which may wait in a collective, has noted it."""
        return self._learner.ranks.position if isinstance(self._learner, Learner) else ALONE

    def _begin(self, activity: str, *, limit_s: float = STANDS_S) -> None:
        if isinstance(self._learner, Learner):
            self._learner.ranks.begin(activity, limit_s=limit_s)

    def _rest(self) -> None:
        """Note that this rank does nothing; give unused memory of a shared GPU back, for the replicas' turn."""
        self._begin(IDLE)
        if self._shares_gpus:
            torch.cuda.empty_cache()

    @on_compute_thread
    def start(self, spec: LearnerSpec) -> LearnerStarted:
        """Read the config, then `load` the model; return the sizes of the model."""
        config = read_run_config(spec, f"learner-{spec.rank}")
        compute_on(learner_threads(config, num_cores=len(os.sched_getaffinity(0)), ranks_here=spec.ranks_here))
        allow_many_files()
        self._shares_gpus = config.cluster.share and config.learner_device is Device.CUDA
        started = self.load(config, spec, open_reader(spec, config))
        self._rest()
        return msgspec.structs.replace(started, gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""))

    def load(self, config: RunConfig, spec: LearnerSpec, reader: PayloadReader) -> LearnerStarted:
        """Make learner and publisher, restore the checkpoint if any; `reader` reads the tokens of each step."""
        self._reader, self._probes = reader, spec.probes
        kind = config.rollout.engine.kind
        stand_in = BACKENDS.get(kind).open_learner
        if stand_in is None:
            self._learner, started = _real_learner(config, spec, self._note)
        else:
            with BACKENDS.naming_package(kind):
                self._learner, started = stand_in(config)
        if spec.checkpoint is not None:
            fault = self._learner.load(Path(spec.checkpoint))
            started = msgspec.structs.replace(started, steps_taken=self._learner.steps_taken, fault=fault)
        self._dtype: torch.dtype = getattr(torch, served_dtype(config.model.path))
        self._open_publisher(self._learner, spec)
        return started

    def _open_publisher(self, learner: Learner | LearnerStandIn, spec: LearnerSpec) -> None:
        """Make rank 0's publisher; then, unless versions are adapters, one on each rank that shares its copy."""
        store, rank, chunk_bytes = Path(spec.store), spec.rank, spec.chunk_bytes
        self._adapter = learner.adapter_config() if isinstance(learner, Learner) else None
        if not isinstance(learner, Learner) or self._adapter is not None:
            if rank == 0:
                self._publisher = Publisher(store, chunk_bytes=chunk_bytes, adapter_config=self._adapter)
            return
        ranks, writers = learner.ranks.num_ranks // learner.ranks.num_copies, spec.writers
        group = group_of(ranks) if writers < ranks else None
        open_here = partial(Publisher, store, chunk_bytes=chunk_bytes, rank=rank, ranks=writers, group=group)
        if rank == 0:
            self._publisher = open_here()
        learner.ranks.sum(0.0)  # rank 0's publisher is there
        if 0 < rank < writers:
            self._publisher = open_here()
        elif group is not None and writers <= rank < ranks:
            self._publisher = RemotePublisher(group, rank=rank, writers=writers)

    def _note(self, progress: LearnerProgress) -> None:
        self._progress = progress

    @on_compute_thread
    def fetch(self, request: FetchRequest) -> dict[str, str]:
        """Read the tokens of the next step; return the trajectories whose tokens are lost, each with a reason."""
        trajectories = {trajectory.id: trajectory for bundle in request.bundles for trajectory in bundle}
        complete, lost = complete_all(list(trajectories.values()), self._reader)
        self._bundles = [
            [
                msgspec.structs.replace(complete[part.id], sequences=part.sequences)
                for part in bundle
                if part.id in complete
            ]
            for bundle in request.bundles
        ]
        return lost

    @on_compute_thread
    def step(self, request: StepRequest) -> StepOutcome:
        """Step on the fetched trajectories; then publish the weights if the request has a version."""
        bundles, self._bundles = self._bundles, []
        self._begin(f"start of step {self._learner.steps_taken + 1}", limit_s=COMPUTES_S)
        metrics = self._learner.step(microbatches(bundles, request.terms))
        stall_s = 0.0 if request.version is None else self._publish(request.version)
        self._rest()
        return StepOutcome(metrics, request.version, stall_s)

    @on_compute_thread
    def publish(self, version: int) -> float:
        """Publish the weights as `version`; return the seconds that the learner stood still for it."""
        stall_s = self._publish(version)
        self._rest()
        return stall_s

    def _publish(self, version: int) -> float:
        """Write this rank's share of the version, if it has one; return the seconds of stall."""
        self._begin(f"wait until the version before {version} is complete", limit_s=COMPUTES_S)
        if not isinstance(self._learner, Learner):
            assert isinstance(self._publisher, Publisher), "a stand-in has one rank"
            return self._publisher.publish(version, self._learner.named_tensors(dtype=self._dtype))
        sources = self._noted(self._learner.sources(dtype=self._dtype, gather=False), version)
        stall_s = 0.0
        if self._publisher is not None:
            stall_s = self._publisher.publish_sources(version, sources)
        elif self._adapter is not None:  # which all ranks gather
            for source in sources:
                for _ in source.read():
                    continue
        if self._probes:
            self._next_tokens = {version: self._learner.probe(self._probes)}
        return stall_s

    def _noted(self, sources: Sequence[TensorSource], version: int) -> list[TensorSource]:
        """Return the sources of a version, which now note when this rank begins to read and copy them."""

        def read(source: TensorSource) -> Iterator[Rows]:
            self._begin(f"copy of {source.stored[0].name} of version {version}")
            yield from source.read()

        return [replace(source, read=partial(read, source)) for source in sources]

    def completed(self, version: int) -> Published:
        """Wait until a published version is complete, and return it; the controller calls only rank 0."""
        assert isinstance(self._publisher, Publisher), "rank 0 publishes"
        return self._publisher.completed(version)

    def next_tokens(self, version: int) -> list[NextToken]:
        """Return the learner's distribution after each probe under its newest version; [] for another version."""
        return self._next_tokens.pop(version, [])

    @on_compute_thread
    def save(self, path: str) -> None:
        """Begin a checkpoint in the folder `path`; return when the state is copied and the next step may begin."""
        self._learner.begin_save(Path(path))
        self._rest()

    def saved(self) -> str:
        """Return when the checkpoint is complete on disk and read back: its fault, or ""."""
        return self._learner.finish_save()


def _real_learner(
    config: RunConfig, spec: LearnerSpec, note: Callable[[LearnerProgress], None]
) -> tuple[Learner, LearnerStarted]:
    """Join the group of ranks and make this rank's learner; return the learner and its sizes.

    If the config has a warm start and this start needs it, rank 0 makes it first; `note` gets the progress.
    """
    device = config.learner_device.value
    try_objective(config.algorithm, device=torch.device(device))
    model = config.model
    refers_to_start = config.algorithm.has_reference and config.algorithm.reference is None
    needs_start = spec.checkpoint is None or refers_to_start or config.learner.lora is not None
    if config.warm_start is not None and needs_start:
        if spec.rank == 0:
            WARM_STARTS.get(config.warm_start.kind).make(
                config, lambda step, steps, loss: note(LearnerProgress("warm start", step, steps, loss))
            )  # the other ranks wait for it in `join_group`
            note(LOADING)
        model = ModelConfig(path=initial_folder(config))
    mesh = join_group(
        spec.rendezvous,
        rank=spec.rank,
        world_size=config.learner.world_size,
        device_type=device,
        shard_ranks=config.learner.shard_ranks,
    )
    learner = Learner(
        model,
        config.learner,
        config.algorithm,
        temperature=config.rollout.sampling.temperature,
        seed=config.seed,
        total_steps=config.steps,
        mesh=mesh,
        rounding=Rounding(fp8.is_quantized, fp8.rounded) if config.learner.rounds_weights else None,
    )
    num_parameters = sum(parameter.numel() for parameter in learner.model.parameters())
    choice = learner.model.attention_choice
    return learner, LearnerStarted(
        num_parameters=num_parameters,
        attention=choice.kernel.value,
        refused=choice.refused,
        attention_share=learner.cost.attention_share,
    )


# ---- in place of a learner, where weights are evaluated


class WeightsActor(PartActor):
    """Publishes a model folder as it is, in place of a learner."""

    def publish(self, spec: WeightsSpec) -> Published:
        """Publish the model as version 0, unless an earlier process left it complete; return it once complete."""
        model = read_run_config(spec, "weights").model.path
        store = Path(spec.store)
        if store.is_dir() and VERSION in complete_versions(store):
            manifest = msgspec.json.decode((store / folder_name(VERSION) / MANIFEST).read_bytes(), type=Manifest)
            return Published(VERSION, manifest.digest, manifest.num_bytes, 0.0)
        allow_many_files()
        publisher = Publisher(store, chunk_bytes=spec.chunk_bytes)
        publisher.publish_sources(VERSION, folder_sources(model, served_dtype(model)))
        return publisher.completed(VERSION)


def folder_sources(model: Path, dtype: str) -> list[TensorSource]:
    """Return sources of every tensor in a model folder, always in the same order; floats as `dtype`."""
    wanted = getattr(torch, dtype)
    sources = []

    def read(path: Path, name: str) -> Iterator[Rows]:
        with safe_open(path, framework="pt") as file:
            yield name, 0, file.get_tensor(name)

    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                part = file.get_slice(name)
                own = part[:0].dtype if part.get_shape() else file.get_tensor(name).dtype
                stored = StoredTensor(name, wanted if own.is_floating_point else own, tuple(part.get_shape()))
                sources.append(TensorSource((stored,), partial(read, path, name)))
    return sources


# ---- frozen models


class FrozenActor(ComputingActor):
    """Hosts a frozen model: the reference (that the config names, or RL begins with) or the teacher."""

    @on_compute_thread
    def start(self, spec: FrozenSpec) -> None:
        """Open the run's segments, and load the model, or connect to its server."""
        compute_on(1)
        config = read_run_config(spec, f"{spec.source}-0")
        self._source, self._column = spec.source, MODEL_COLUMNS[spec.source]
        self._reader, self._writer = open_reader(spec, config), open_writer(spec, config)
        self._model = self._open_model(config, spec)

    def _open_model(self, config: RunConfig, spec: FrozenSpec) -> FrozenModel | ServedModel:
        """Load the model of a folder, or connect to the teacher's server."""
        algorithm = config.algorithm
        folder = algorithm.reference or initial_folder(config)
        if spec.source is Source.TEACHER:
            if algorithm.teacher_url is not None:
                return ServedModel(algorithm.teacher_url, api_key=spec.secret)
            assert algorithm.teacher_folder is not None, "a stage of the teacher has a folder or an address"
            folder = algorithm.teacher_folder
        return FrozenModel(
            folder,
            field=f"algorithm.{spec.source}",
            vocab_size=read_sizes(config.model.path).vocab_size,
            temperature=config.rollout.sampling.temperature,
            max_tokens=config.packer.max_tokens,
            mesh=join_group(spec.rendezvous, rank=0, world_size=1, device_type=config.learner_device.value),
            offload=config.learner.offload,
            attention=config.learner.attention,
        )

    @on_compute_thread
    def logprobs(self, request: FrozenRequest) -> FrozenAnswer:
        """Compute and store log-probabilities of one packed batch; return where they are stored.

        Raises `ConfigError` if a log-probability is not finite.
        """
        started = time.perf_counter()
        complete, lost = complete_all(request.trajectories, self._reader)
        # the model chooses its experts itself
        trajectories = [msgspec.structs.replace(item, routed_experts=None) for item in complete.values()]
        found = self._model.logprobs(trajectories) if trajectories else []
        for trajectory, logprobs in zip(trajectories, found, strict=True):
            if not np.isfinite(logprobs).all():
                raise ConfigError(
                    f"algorithm.{self._source}: its log-probabilities of {trajectory.id} are not all finite; name"
                    " another model, or compute it in another precision"
                )
        pieces = [
            ColumnPiece(trajectory_id=trajectory.id, name=self._column, values=token_values(logprobs))
            for trajectory, logprobs in zip(trajectories, found, strict=True)
        ]
        refs = zip(pieces, self._writer.write_all(pieces), strict=True)
        columns = {piece.trajectory_id: ColumnRef(piece.values.dtype, at) for piece, at in refs}
        if self._writer.shared:
            self._writer.sync()
        return FrozenAnswer(columns, lost, time.perf_counter() - started, self._model.fingerprint)
