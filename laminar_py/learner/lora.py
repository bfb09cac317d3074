"""Low-rank adapters on the policy's projections, by peft. Called by `step` and `export`, where they are set.

An adapted projection computes `W x + alpha / rank * B A x` (Hu et al., 2021, arXiv:2106.09685); A begins random,
B at zero, so the policy begins as its base. Invariant: only A and B are trainable; what is frozen stays in fp32
like all master weights, so an engine that merges computes the same sums.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PreTrainedModel

from laminar_py.config.learner import LoraConfig
from laminar_py.config.section import ConfigError
from laminar_py.learner.checkpoint import load_weights
from laminar_py.learner.distributed import share_record
from laminar_py.learner.marker import Adapted
from laminar_py.learner.model import gathered, is_mixture
from laminar_py.learner.sharding import stand_ins
from laminar_py.records.adapters import PREFIX, base_digest
from laminar_py.records.protocols import RefusedError

_NAME = "policy"  # of the adapters among those that peft could hold beside each other


class LoraAdapters:
    """Adapters in the layers of `model`, whose other weights are frozen. Make them before `shard`.

    A is drawn from `seed`, so it is the same on all ranks; `base` is the folder that the model was loaded from.
    Raises `ConfigError` for a mixture of experts, whose expert matrices are no modules that peft adapts, and for a
    model without one of the targets.
    """

    def __init__(self, model: PreTrainedModel, settings: LoraConfig, *, base: Path, seed: int) -> None:
        _check(model, settings)
        self._model = model
        self._settings = settings
        self._base = base.resolve()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with stand_ins(model):
                peft.inject_adapter_in_model(_config(settings), model, adapter_name=_NAME)
        self._layers = [module for module in model.modules() if isinstance(module, LoraLayer)]

    def adapted(self, mesh: DeviceMesh | None) -> Adapted:
        """Base and shape of the adapters. Collective: rank 0 reads all of the base for its digest."""
        if mesh is None:
            return _adapted(self._settings, self._digest)
        own = _adapted(self._settings, self._digest) if mesh.get_rank() == 0 else None
        return share_record(own, Adapted, mesh=mesh)

    def config(self) -> bytes:
        """`adapter_config.json` as peft writes it. The first time it reads all of the base, for its digest."""
        config = _config(self._settings)
        config.base_model_name_or_path, config.revision = str(self._base), self._digest
        config.inference_mode = True
        return json.dumps(config.to_dict(), sort_keys=True, default=sorted, indent=2).encode()

    def tensors(self, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """A [rank, in] and B [out, rank] of each adapted projection under peft's names, in full, cast to `dtype`.

        Collective: every rank iterates to the end.
        """
        for name, parameter in self._model.named_parameters():
            if f".{_NAME}." in name:
                yield PREFIX + name.replace(f".{_NAME}.", "."), gathered(parameter, dtype)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The base as it was, inside: adapters count zero times. Only for passes without gradients.

        Their scale is set rather than peft's own switch, which also freezes parameters that FSDP has taken over.
        """
        for layer in self._layers:
            layer.set_scale(_NAME, 0.0)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.set_scale(_NAME, 1.0)

    @cached_property
    def _digest(self) -> str:
        return _digest_of(self._base)


def merged(checkpoint: Path, *, base: Path, settings: LoraConfig) -> PreTrainedModel:
    """The model in `base` with the adapters of a checkpoint added, in fp32 on the CPU.

    Raises `ConfigError` if they are of another base or other settings, the base has no weights, or the checkpoint
    is torn.
    """
    adapted = _adapted(settings, _digest_of(base))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    tuner = peft.LoraModel(model, _config(settings), _NAME)
    load_weights(checkpoint, model, adapted=adapted)
    whole: PreTrainedModel = tuner.merge_and_unload()
    return whole


def _digest_of(base: Path) -> str:
    try:
        return base_digest(base)
    except RefusedError as error:
        raise ConfigError(
            f"learner.lora: no *.safetensors in {base}, which the adapters are added to; put the weights back"
        ) from error


def _config(settings: LoraConfig) -> peft.LoraConfig:
    return peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=[target.value for target in settings.targets],
    )


def _adapted(settings: LoraConfig, digest: str) -> Adapted:
    targets = tuple(sorted(target.value for target in settings.targets))
    return Adapted(digest, settings.rank, settings.alpha, targets)


def _check(model: PreTrainedModel, settings: LoraConfig) -> None:
    if is_mixture(model.config):
        raise ConfigError("learner.lora: experts of a mixture model cannot be adapted; leave learner.lora out")
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    missing = ",".join(target for target in settings.targets if target not in names)
    if missing:
        raise ConfigError(f"learner.lora.targets={missing}: the model has no such modules; leave them out")
