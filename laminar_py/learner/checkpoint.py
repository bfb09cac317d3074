"""Checkpoints of the learner: weights, optimizer, step and random states. `step.Learner` and `export` use them.

A save has two halves. `begin` copies the state out of the learner's memory; the learner waits for that alone. A
thread writes the files from the copy during the next steps. One save runs at a time. States: IDLE -> (begin)
COPIED -> `<name>.tmp` with all files -> `complete.json` in it -> renamed to `<name>` -> read back. `load` refuses
a checkpoint that is not complete, and a save does not change the learner (`tests/learner/test_checkpoint.py`).
Both compare the files with the learner (law 13, `tests/learner/test_checkpoint_proof.py`).
"""

import math
import shutil
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    OptimizerStateType,
    StateDictOptions,
    ValueType,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from laminar_py.config.section import ConfigError
from laminar_py.learner.distributed import COLLECTIVE_S
from laminar_py.learner.marker import AdapterFingerprint, Architecture, complete_checkpoint, read_marker
from laminar_py.learner.readback import TensorSample, counted_updates, sample_learner, saved_fault, stored_fault
from laminar_py.records.codec import decode, encode
from laminar_py.records.host import write_file

# Torch warns of a missing process group even if `no_dist` tells it that there is none.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class RandomState(msgspec.Struct, frozen=True):
    """States of the random generators of one rank."""

    cpu: bytes
    cuda: bytes | None  # of the rank's device; None on a CPU


class LoadedCheckpoint(msgspec.Struct, frozen=True):
    """Result of a load, e.g. `LoadedCheckpoint(step=40, updates=160, fault="")`."""

    step: int  # steps taken
    updates: int  # of the optimizer since the start
    fault: str  # how the learner differs from the files; "" if it does not


class Trained(NamedTuple):
    """A model and the optimizer of its trained weights."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer


class Checkpointer:
    """Saves and restores one learner. All ranks must make a `Checkpointer` and call each method together."""

    def __init__(
        self,
        policy: Trained,
        *,
        mesh: DeviceMesh | None,
        adapters: AdapterFingerprint | None = None,
        critic: Trained | None = None,
    ) -> None:
        self._parts = {"": policy} | ({} if critic is None else {"critic_": critic})  # by prefix of their keys
        self._adapters = adapters
        self._rank, self._world_size = (mesh.get_rank(), mesh.size()) if mesh else (0, 1)
        # A group of its own, since the writing threads communicate at the same time as the collectives of steps.
        timeout = timedelta(seconds=COLLECTIVE_S)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if mesh else None
        self._model = policy.model
        self._device: torch.device = self._model.compute_device
        self._on_gpu = self._device.type == "cuda"
        # The stager keeps its memory, so that the next copy needs no fresh pages. It is private API: the public
        # class around it works for one copy only in torch 2.11.
        self._stager = StateDictStager(pin_memory=self._on_gpu)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[str] | None = None

    def begin(self, folder: Path, *, step: int, updates: int) -> None:
        """Copy the state after `step` steps and `updates` of the optimizer, and start to write it.

        Replaces an older `folder`. Waits first for a checkpoint that is still being written.
        """
        self.finish()
        samples = self._samples(seed=f"{folder.name} of {self._rank}")
        staged = self._stager.stage(self._state(), non_blocking=self._on_gpu)
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        cuda = torch.cuda.get_rng_state(self._device).numpy().tobytes() if self._on_gpu else None
        random = encode(RandomState(torch.get_rng_state().numpy().tobytes(), cuda))
        self._writing = self._thread.submit(self._write, folder, staged, random, samples, step, updates)

    def finish(self) -> str:
        """Wait until the last checkpoint, if any, is complete on disk and read back.

        Returns how the files differ from what the learner was, "" if they do not. Raises the error of a write that
        failed.
        """
        return "" if self._writing is None else self._writing.result()

    def load(self, folder: Path) -> LoadedCheckpoint:
        """Restore model, optimizer and random generators bit for bit, and compare the learner with the files.

        A checkpoint of another world size leaves the random generators as they are. Raises `ConfigError` if the
        checkpoint is incomplete or of another model.
        """
        marker = read_marker(folder)
        check_model(folder, marker.model, architecture(self._model, self._adapters))
        if marker.has_critic != (len(self._parts) > 1):
            saved, own = ("has a critic", "none") if marker.has_critic else ("has no critic", "one")
            raise ConfigError(
                f"checkpoint={folder}: {saved}, and this run has {own}; set algorithm.advantage as it was, or"
                " start a new run"
            )
        state = self._state()
        state_dict_loader.load(state, checkpoint_id=folder, process_group=self._group, no_dist=self._group is None)
        for prefix, one in self._parts.items():
            set_state_dict(
                one.model,
                one.optimizer,
                model_state_dict=state[f"{prefix}model"],
                optim_state_dict=state[f"{prefix}optimizer"],
                options=StateDictOptions(strict=False),  # a checkpoint has no frozen weights
            )
        if marker.world_size == self._world_size:
            random = decode(RandomState, _random_file(folder, self._rank).read_bytes())
            torch.set_rng_state(torch.frombuffer(bytearray(random.cpu), dtype=torch.uint8))
            if random.cuda is not None and self._on_gpu:
                cuda = torch.frombuffer(bytearray(random.cuda), dtype=torch.uint8)
                torch.cuda.set_rng_state(cuda, self._device)
        samples = self._samples(seed=f"load {folder.name} on {self._rank}")
        counted = counted_updates(samples)
        updates = counted if marker.updates is None else marker.updates
        fault = stored_fault(folder, samples)
        if not fault and counted != updates:
            fault = f"checkpoint {folder.name}: has {updates} updates, and AdamW has counted {counted}"
        return LoadedCheckpoint(marker.step, updates, fault)

    # ---- on the writing thread

    def _write(
        self,
        folder: Path,
        staged: dict[str, object],
        random: bytes,
        samples: Sequence[TensorSample],
        step: int,
        updates: int,
    ) -> str:
        """Write the `staged` state and this rank's `random` state; rank 0 completes `folder` after all ranks.

        The files are in `<name>.tmp` until then. Runs in a thread. Returns the fault that the files have by
        `samples` of the learner, or "". Raises the first error of any rank's write.
        """
        partial = folder.with_name(f"{folder.name}.tmp")
        if self._rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self._barrier()
        try:
            state_dict_saver.save(
                staged, checkpoint_id=partial, process_group=self._group, no_dist=self._group is None
            )
        except CheckpointException as error:  # a BaseException, which would end the thread without a message
            raise next(iter(error.failures.values()))[0] from None
        write_file(_random_file(partial, self._rank), random)
        self._barrier()
        if self._rank == 0:
            model = architecture(self._model, self._adapters)
            complete_checkpoint(
                partial,
                folder,
                step=step,
                world_size=self._world_size,
                model=model,
                updates=updates,
                has_critic=len(self._parts) > 1,
            )
        self._barrier()
        return saved_fault(folder, samples, step=step, updates=updates)

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)

    # ---- the state

    def _samples(self, *, seed: str) -> list[TensorSample]:
        """Return samples of policy and critic, at places drawn from `seed`."""
        found = []
        for prefix, one in self._parts.items():
            found += sample_learner(one.model, one.optimizer, seed=f"{seed}{prefix}", prefix=prefix)
        return found

    def _state(self) -> dict[str, Any]:
        """Return the trained weights and the optimizer's moments of each part, under their keys in the files."""
        state: dict[str, Any] = {}
        for prefix, one in self._parts.items():
            state[f"{prefix}model"], state[f"{prefix}optimizer"] = _state_of(one)
        return state


def _state_of(one: Trained) -> tuple[dict[str, ValueType], OptimizerStateType]:
    """Return trained weights and optimizer moments; before the first step the moments are zero."""
    fresh = not one.optimizer.state
    weights, moments = get_state_dict(one.model, one.optimizer)
    if fresh:  # torch made them by a step, which the bias correction of later steps must not count
        for values in one.optimizer.state.values():
            if isinstance(values.get("step"), Tensor):
                values["step"].zero_()
    return _trained(weights, one.model), moments


def load_weights(folder: Path, model: PreTrainedModel, *, adapters: AdapterFingerprint | None = None) -> None:
    """Load a checkpoint's trained weights into an unsharded `model`, whatever world size saved them.

    Frozen weights do not change. Raises `ConfigError` if the checkpoint is incomplete, of another model, or
    deleted during the read.
    """
    check_model(folder, read_marker(folder).model, architecture(model, adapters))
    weights = _trained(get_model_state_dict(model), model)
    try:
        state_dict_loader.load({"model": weights}, checkpoint_id=folder, no_dist=True)
    except CheckpointException:
        read_marker(folder)  # raises if the run has deleted the checkpoint during the read
        raise
    set_model_state_dict(model, weights, options=StateDictOptions(strict=False))


def _trained(weights: dict[str, ValueType], model: PreTrainedModel) -> dict[str, ValueType]:
    """Return the entries of `weights` that are not frozen in `model`."""
    every = model.named_parameters(remove_duplicate=False)  # torch's own filter misses tied weights
    frozen = {name for name, parameter in every if not parameter.requires_grad}
    return {name: value for name, value in weights.items() if name not in frozen}


def architecture(model: PreTrainedModel, adapters: AdapterFingerprint | None) -> Architecture:
    """Return a model's type and a digest over the sorted names and full shapes of its parameters."""
    shapes = sorted((name, list(parameter.shape)) for name, parameter in model.named_parameters())
    digest = blake3(msgspec.json.encode(shapes)).hexdigest(length=16)
    num_parameters = sum(math.prod(shape) for _, shape in shapes)
    return Architecture(
        model_type=str(model.config.model_type),
        num_parameters=num_parameters,
        fingerprint=digest,
        adapted=adapters,
    )


def check_model(folder: Path, saved: Architecture, present: Architecture) -> None:
    """Raise `ConfigError` unless the model `saved` in the checkpoint `folder` equals the `present` model."""
    if saved != present:
        raise ConfigError(
            f"checkpoint={folder}: was saved of a {saved}, and this run has a {present}; set model.path, its warm"
            " start and learner.lora as they were, or start a new run"
        )


def _random_file(folder: Path, rank: int) -> Path:
    return folder / f"random-{rank}.bin"
