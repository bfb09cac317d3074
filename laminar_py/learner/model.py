"""The policy: a Hugging Face decoder whose forward takes a packed row and returns log-probabilities.

Used by `step` and `warm_start`. Invariant: after `load_policy` the model's forward is the packed one, whatever
wraps it later; master weights are fp32, and dropout never acts.
"""

import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from laminar_py.config.model import ModelConfig
from laminar_py.learner.attention import choose_kernel, register_kernel
from laminar_py.learner.losses.logprob import Support, token_logprobs
from laminar_py.learner.optimizer import PARTITION
from laminar_py.learner.routing import RouterReplay
from laminar_py.records.batch import MicroBatch


def load_reference(folder: Path, *, vocab_size: int, temperature: float, device: torch.device) -> PreTrainedModel:
    """A model that stays as it is, for its log-probabilities.

    Raises `ValueError` if it cannot serve, or if `vocab_size`, the policy's, is not its own.
    """
    check_model_folder(ModelConfig(path=folder), field="algorithm.reference")
    model = load_policy(ModelConfig(path=folder), seed=0, temperature=temperature, device=device)
    if model.config.vocab_size != vocab_size:
        raise ValueError(
            f"algorithm.reference={folder}: has a vocabulary of {model.config.vocab_size}, the model one of"
            f" {vocab_size}; name a model with the same tokenizer"
        )
    model.requires_grad_(False)
    model.router_replay = None  # its experts are its own choice
    return model


def load_policy(settings: ModelConfig, *, seed: int, temperature: float, device: torch.device) -> PreTrainedModel:
    """The model in the folder `settings.path`, in fp32 on `device`, with the packed forward.

    `from_scratch` draws its weights from `seed` instead. Raises `ValueError` if the folder cannot serve.
    """
    check_model_folder(settings)
    if temperature <= 0:
        raise ValueError(
            f"rollout.sampling.temperature={temperature}: the learner divides logits by it; set it above 0"
        )
    kernel = choose_kernel(device)
    register_kernel(kernel)
    logging.disable_progress_bar()  # it would fill the log of a process that has no terminal
    config = AutoConfig.from_pretrained(settings.path)
    if settings.from_scratch:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel.value, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            settings.path, attn_implementation=kernel.value, dtype=torch.float32, local_files_only=True
        )
    if is_mixture(config):
        model.router_replay = RouterReplay(model)
    model.forward = types.MethodType(_packed_forward(temperature), model)
    model.compute_device = device  # `model.device` is the host's where FSDP offloads to it
    # Evaluation mode: the new log-probabilities must be those of the weights, without dropout.
    return model.to(device).eval()


def is_mixture(config: PretrainedConfig) -> bool:
    """Whether the model has experts."""
    return bool(getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None))


def check_model_folder(settings: ModelConfig, *, field: str = "model.path") -> None:
    """Raise `ValueError`, naming the field, the value and the remedy, unless the folder holds a model."""
    path = settings.path
    if not path.is_dir():
        raise ValueError(f"{field}={path}: no such folder; name a Hugging Face model folder")
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ValueError(f"{field}={path}: has no {name}; name a Hugging Face model folder")
    if not settings.from_scratch and not any(path.glob("*.safetensors")):
        raise ValueError(f"{field}={path}: has no safetensors; add the weights or set model.from_scratch=true")


def add_partition(model: PreTrainedModel) -> None:
    """A linear head that gives log Z of a prompt by the model's state at its last token; 0 at first.

    Call it before `shard`. It is trained and kept in checkpoints, and no part of what is published.
    """
    head = nn.Linear(model.config.hidden_size, 1, device=model.compute_device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model.add_module(PARTITION, head)


def shard(model: PreTrainedModel, mesh: DeviceMesh, *, offload: bool = False) -> None:
    """FSDP2 over the data-parallel `mesh`: each layer, then the rest; gradients are summed over ranks.

    On CUDA the layers compute in bf16 and reduce in fp32; on a CPU all is fp32. With `offload`, parameters and
    gradients are in the host's memory between their uses.
    """
    on_gpu = mesh.device_type == "cuda"
    precision = MixedPrecisionPolicy()
    if on_gpu:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    where = CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()
    layers = list(getattr(model.base_model, "layers", ()))
    if not layers:
        raise ValueError(
            f"model.path={model.name_or_path}: a {model.config.model_type} model names no list of layers, which is"
            " what is sharded; train a decoder of transformers that has one, or set learner.world_size=1 on a CPU"
        )
    partition: nn.Module | None = getattr(model, PARTITION, None)
    if partition is not None:  # in fp32: the step between bf16 numbers near 10 is 0.06, and log Z is squared
        fully_shard(partition, mesh=mesh, offload_policy=where)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=where)
    # Neither setting is recursive: a layer left out would divide its gradients by the world size.
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The sharded modules of a model, itself included; none before `shard`."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def policy_logprobs(model: PreTrainedModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of its distribution, fp32 [T] each, at the model's temperature."""
    logprobs, entropy, _ = policy_outputs(model, batch)
    return logprobs, entropy


def policy_outputs(model: PreTrainedModel, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same, and log Z of what follows each token, fp32 [T], where the model has a head for it."""
    device = model.compute_device
    replay: RouterReplay | None = getattr(model, "router_replay", None)
    if replay is not None:
        replay.force(batch, device=device)
    outputs: tuple[Tensor, Tensor, Tensor | None] = model(
        input_ids=torch.tensor(batch.input_ids, dtype=torch.long, device=device),
        position_ids=torch.tensor(batch.position_ids, dtype=torch.long, device=device),
        labels=torch.tensor(batch.labels, dtype=torch.long, device=device),
        cu_seqlens=torch.tensor(batch.cu_seqlens, dtype=torch.int32, device=device),
        longest=max(batch.lengths),
        support=_support(batch, device),
    )
    return outputs


def _support(batch: MicroBatch, device: torch.device) -> Support | None:
    if batch.support is None:
        return None
    return Support.build(batch.support.counts, batch.support.ids, device=device)


def _packed_forward(temperature: float) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    """The forward that is bound before sharding, so that FSDP's hooks gather the output embedding too."""

    def forward(
        model: PreTrainedModel,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        cu_seqlens: Tensor,
        longest: int,
        support: Support | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        hidden = model.base_model(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens,
            max_length_q=longest,
            max_length_k=longest,
        ).last_hidden_state[0]
        head = model.get_output_embeddings().weight
        logprobs, entropy = token_logprobs(hidden, head, labels, temperature=temperature, support=support)
        partition: nn.Module | None = getattr(model, PARTITION, None)
        if partition is None:
            return logprobs, entropy, None
        return logprobs, entropy, partition(hidden.detach().float())[:, 0]  # log Z does not bend these features

    return forward


def gathered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A float cast to `dtype` while it is still sharded, then in full and contiguous. Collective."""
    cast = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return (cast.full_tensor() if isinstance(cast, DTensor) else cast).detach().contiguous()
