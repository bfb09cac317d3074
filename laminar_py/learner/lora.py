"""Low-rank adapters on the policy's projections, by peft. `step` and `export` use them if a config sets them.

An adapted projection computes `W x + alpha / rank * B A x` (Hu et al., 2021, arXiv:2106.09685). A starts random
and B at zero, so the policy starts as its base. Only A and B are trainable. Frozen weights stay in fp32 like all
master weights, so an engine that merges the adapters computes the same sums (`tests/learner/test_lora.py`).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path

import peft
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PreTrainedModel

from laminar_py.config.learner import LoraConfig
from laminar_py.config.section import ConfigError
from laminar_py.learner.checkpoint import load_weights
from laminar_py.learner.distributed import share_record
from laminar_py.learner.marker import AdapterFingerprint
from laminar_py.learner.model import gather_full, is_mixture
from laminar_py.learner.sharding import placeholder_weights
from laminar_py.records.engine import RefusedError
from laminar_py.records.weights import ADAPTER_WEIGHTS, PREFIX, Rows, StoredTensor, TensorSource, base_digest

_NAME = "policy"  # peft can hold several adapters by name


class LoraAdapters:
    """Adapters in the layers of `model`. Making them freezes the model's other weights; make them before `shard`.

    A is drawn from `seed`, so it is the same on all ranks. `base` is the folder that the model was loaded from.
    Raises `ConfigError` for a mixture of experts, whose expert matrices are no modules that peft can adapt, and
    for a model that lacks one of the targets.
    """

    def __init__(self, model: PreTrainedModel, settings: LoraConfig, *, base: Path, seed: int) -> None:
        _check_targets(model, settings)
        self._model = model
        self._settings = settings
        self._base = base.resolve()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with placeholder_weights(model):
                peft.inject_adapter_in_model(_peft_config(settings), model, adapter_name=_NAME)
        self._layers = [module for module in model.modules() if isinstance(module, LoraLayer)]

    def fingerprint(self, mesh: DeviceMesh | None) -> AdapterFingerprint:
        """Return the adapters' fingerprint. Collective: rank 0 reads the whole base folder for its digest."""
        if mesh is None:
            return _fingerprint(self._settings, self._base_digest)
        of_rank_0 = _fingerprint(self._settings, self._base_digest) if mesh.get_rank() == 0 else None
        return share_record(of_rank_0, AdapterFingerprint, mesh=mesh)

    def config(self) -> bytes:
        """Text of `adapter_config.json` as peft writes it. The first call reads the base folder for its digest."""
        config = _peft_config(self._settings)
        config.base_model_name_or_path, config.revision = str(self._base), self._base_digest
        config.inference_mode = True
        return json.dumps(config.to_dict(), sort_keys=True, default=sorted, indent=2).encode()

    def sources(self, *, dtype: torch.dtype) -> list[TensorSource]:
        """Return sources of A [rank, in] and B [out, rank] of each projection under peft's names, cast to `dtype`.

        Collective: every rank must read them all, since each tensor is gathered from all ranks.
        """

        def read(name: str, parameter: nn.Parameter) -> Iterator[Rows]:
            yield name, 0, gather_full(parameter, dtype)

        return [
            TensorSource((StoredTensor(name, dtype, tuple(one.shape)),), partial(read, name, one))
            for name, one in _adapter_parameters(self._model)
        ]

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Set the adapters' scale to 0 inside the block, so that the model computes as its base.

        For passes without gradients. peft's own switch would also freeze parameters, which FSDP has replaced.
        """
        for layer in self._layers:
            layer.set_scale(_NAME, 0.0)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.set_scale(_NAME, 1.0)

    @cached_property
    def _base_digest(self) -> str:
        return _digest_base(self._base)


def load_merged(checkpoint: Path, *, base: Path, settings: LoraConfig) -> PreTrainedModel:
    """Load the model in `base` and merge the adapters of a checkpoint into it, in fp32 on the CPU.

    Raises `ConfigError` if the adapters have another base or other settings, the base has no weights, or the
    checkpoint is incomplete.
    """
    result: PreTrainedModel = _load_adapted(checkpoint, base, settings).merge_and_unload()
    return result


def write_adapter(checkpoint: Path, folder: Path, *, base: Path, settings: LoraConfig, dtype: torch.dtype) -> None:
    """Write the adapters of a checkpoint as a new folder for peft, whose config names `base`.

    Raises `ConfigError` as `load_merged` does.
    """
    tuner = _load_adapted(checkpoint, base, settings)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in _adapter_parameters(tuner.model)}
    folder.mkdir(parents=True)
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = _peft_config(settings)
    config.base_model_name_or_path, config.inference_mode = str(base.resolve()), True
    config.save_pretrained(folder)


def _adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield A and B of each projection under peft's names."""
    for name, parameter in model.named_parameters():
        if f".{_NAME}." in name:
            yield PREFIX + name.replace(f".{_NAME}.", "."), parameter


def _load_adapted(checkpoint: Path, base: Path, settings: LoraConfig) -> peft.LoraModel:
    """Load the model in `base` with the adapters of a checkpoint beside it, in fp32 on the CPU."""
    fingerprint = _fingerprint(settings, _digest_base(base))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    tuner = peft.LoraModel(model, _peft_config(settings), _NAME)
    load_weights(checkpoint, model, adapters=fingerprint)
    return tuner


def _digest_base(base: Path) -> str:
    """Return the digest of the weights in `base`. Raises `ConfigError` if the folder has none."""
    try:
        return base_digest(base)
    except RefusedError as error:
        raise ConfigError(
            f"learner.lora: no *.safetensors in {base}, which the adapters are added to; put the weights back"
        ) from error


def _peft_config(settings: LoraConfig) -> peft.LoraConfig:
    """Return the settings in peft's own type."""
    return peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=[target.value for target in settings.targets],
    )


def _fingerprint(settings: LoraConfig, digest: str) -> AdapterFingerprint:
    targets = tuple(sorted(target.value for target in settings.targets))
    return AdapterFingerprint(digest, settings.rank, settings.alpha, targets)


def _check_targets(model: PreTrainedModel, settings: LoraConfig) -> None:
    """Raise `ConfigError` for a mixture of experts, or if the model lacks a module that should get an adapter."""
    if is_mixture(model.config):
        raise ConfigError("learner.lora: experts of a mixture model cannot be adapted; leave learner.lora out")
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    missing = ",".join(target for target in settings.targets if target not in names)
    if missing:
        raise ConfigError(f"learner.lora.targets={missing}: the model has no such modules; leave them out")
