"""The policy: a Hugging Face decoder whose forward takes a packed row and returns log-probabilities.

`step`, `reference` and `warm_start` load models here. `load_policy` replaces the model's forward by the packed one
before anything wraps the model. Master weights are fp32, and dropout is off, so that log-probabilities are those
of the weights (law 4).
"""

import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from laminar_py.config.data import ModelConfig
from laminar_py.config.section import ConfigError
from laminar_py.learner.attention import choose_kernel, register_kernel
from laminar_py.learner.layers import RouterReplay, fuse_norms
from laminar_py.learner.losses.logprob import Support, token_logprobs
from laminar_py.learner.sharding import make_buffers
from laminar_py.records.trajectory import MicroBatch


def load_reference(
    folder: Path, *, vocab_size: int, temperature: float, device: torch.device, on_meta: bool = False
) -> PreTrainedModel:
    """Load a frozen model for its log-probabilities; `on_meta` without weights, as in `load_policy`.

    Raises `ConfigError` if the folder holds no usable model, or its vocabulary is not the policy's `vocab_size`.
    """
    check_model_folder(ModelConfig(path=folder), field="algorithm.reference")
    source = ModelConfig(path=folder)
    model = load_policy(source, seed=0, temperature=temperature, device=device, on_meta=on_meta)
    if model.config.vocab_size != vocab_size:
        raise ConfigError(
            f"algorithm.reference={folder}: has a vocabulary of {model.config.vocab_size}, the model one of"
            f" {vocab_size}; name a model with the same tokenizer"
        )
    model.requires_grad_(False)
    model.router_replay = None  # the reference chooses its own experts
    return model


def load_policy(
    settings: ModelConfig, *, seed: int, temperature: float, device: torch.device, on_meta: bool = False
) -> PreTrainedModel:
    """Load the model in the folder `settings.path`, in fp32 on `device`, with the packed forward.

    `settings.from_scratch` draws its weights from `seed` instead. With `on_meta` it has no weights until
    `sharding.shard` fills them in. Raises `ConfigError` if the folder holds no usable model.
    """
    check_model_folder(settings)
    if temperature <= 0:
        raise ConfigError(
            f"rollout.sampling.temperature={temperature}: the learner divides logits by it; set it above 0"
        )
    kernel = choose_kernel(device)
    register_kernel(kernel)
    logging.disable_progress_bar()  # it would fill the log of a process that has no terminal
    try:
        load = _load_on_meta if on_meta else _load
        model = load(settings, seed=seed, attention=kernel.value)
    except ValueError as error:  # transformers raises it for a model that it does not know
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model.path={settings.path}: transformers cannot load it ({reason}); name a causal language model"
        ) from error
    if device.type == "cuda":
        fuse_norms(model)
    if is_mixture(model.config):
        model.router_replay = RouterReplay(model)
    model.forward = types.MethodType(_packed_forward(temperature), model)
    model.compute_device = device  # `model.device` is the host's where FSDP offloads to it
    # Evaluation mode: the new log-probabilities must follow from the weights alone, without dropout.
    return model.eval() if on_meta else model.to(device).eval()


def _load_on_meta(settings: ModelConfig, *, seed: int, attention: str) -> PreTrainedModel:
    """Make the model with its buffers but without weights, so that `seed` has no use."""
    config = AutoConfig.from_pretrained(settings.path)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32
        )
    make_buffers(model)
    return model


def _load(settings: ModelConfig, *, seed: int, attention: str) -> PreTrainedModel:
    """Return the model in fp32 with attention kernel `attention`; drawn from `seed` with `from_scratch`."""
    config = AutoConfig.from_pretrained(settings.path)
    if not settings.from_scratch:
        return AutoModelForCausalLM.from_pretrained(
            settings.path, attn_implementation=attention, dtype=torch.float32, local_files_only=True
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def is_mixture(config: PretrainedConfig) -> bool:
    """True for a mixture-of-experts model."""
    return bool(getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None))


def check_model_folder(settings: ModelConfig, *, field: str = "model.path") -> None:
    """Raise `ConfigError`, naming the field, the value and the remedy, unless the folder holds a model."""
    path = settings.path
    if not path.is_dir():
        raise ConfigError(f"{field}={path}: no such folder; name a Hugging Face model folder")
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ConfigError(f"{field}={path}: has no {name}; name a Hugging Face model folder")
    if not settings.from_scratch and not any(path.glob("*.safetensors")):
        raise ConfigError(f"{field}={path}: has no safetensors; add the weights or set model.from_scratch=true")


def policy_logprobs(
    model: PreTrainedModel, batch: MicroBatch, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the policy: log-probability of each label and entropy of its distribution, fp32 [T] each.

    Both are at the model's temperature. With `rows` [N], ascending, only these rows go through the output
    embedding, and the results are [N]: a loss needs no rows of prompts.
    """
    device = model.compute_device
    replay: RouterReplay | None = getattr(model, "router_replay", None)
    if replay is not None:
        replay.force(batch, device=device)
    labels = torch.tensor(batch.labels, dtype=torch.long, device=device)
    outputs: tuple[Tensor, Tensor] = model(
        input_ids=torch.tensor(batch.input_ids, dtype=torch.long, device=device),
        position_ids=torch.tensor(batch.position_ids, dtype=torch.long, device=device),
        rows=rows,
        labels=labels if rows is None else labels[rows],
        cu_seqlens=torch.tensor(batch.cu_seqlens, dtype=torch.int32, device=device),
        longest=max(batch.lengths),
        support=_support(batch, rows, device),
    )
    return outputs


def _support(batch: MicroBatch, rows: Tensor | None, device: torch.device) -> Support | None:
    """Return the ids among which the engine sampled the tokens at `rows`, None where it did not record them."""
    if batch.support is None:
        return None
    counts, ids = batch.support.counts, batch.support.ids
    if rows is not None:
        chosen = np.zeros(len(counts), dtype=np.bool_)
        chosen[rows.cpu().numpy()] = True
        counts, ids = counts[chosen], ids[np.repeat(chosen, counts)]
    return Support.build(counts, ids, device=device)


def _packed_forward(temperature: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make the packed forward, which must replace the model's before FSDP hooks it to gather the embedding."""

    def forward(
        model: PreTrainedModel,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        rows: Tensor | None,
        labels: Tensor,
        cu_seqlens: Tensor,
        longest: int,
        support: Support | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities and entropies [N] of `labels` at `rows`, without logits of other positions."""
        hidden = model.base_model(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens,
            max_length_q=longest,
            max_length_k=longest,
        ).last_hidden_state[0]
        if rows is not None:
            hidden = hidden.index_select(0, rows)
        head = model.get_output_embeddings().weight
        return token_logprobs(hidden, head, labels, temperature=temperature, support=support)

    return forward


def gather_full(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a float tensor to `dtype` while it is sharded, then gather it in full and contiguous. Collective."""
    cast = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return (cast.full_tensor() if isinstance(cast, DTensor) else cast).detach().contiguous()
