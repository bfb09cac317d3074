"""The policy: a Hugging Face decoder whose forward takes a packed row and returns log-probabilities.

`step`, `reference` and `warm_start` load models here. `load_policy` replaces the model's forward by the packed
forward before anything wraps the model. Master weights are fp32, and dropout is off, so that log-probabilities
follow from the weights alone (law 4).
"""

import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import Attention
from laminar_py.config.section import ConfigError
from laminar_py.learner.attention import Segments, register_kernel
from laminar_py.learner.context import Context
from laminar_py.learner.experts import register_experts
from laminar_py.learner.kernel_check import Choice, choose_kernel
from laminar_py.learner.layers import RouterReplay, fuse_norms
from laminar_py.learner.losses.logprob import Support, token_logprobs
from laminar_py.learner.model_folder import check_tied_head, missing_weight
from laminar_py.learner.sharding import make_buffers
from laminar_py.records.trajectory import MicroBatch

SAMPLED = 3  # values of each tensor in a fingerprint
TEACHER = "algorithm.teacher"  # whose vocabulary may be padded with more unused rows than the policy's


def load_frozen(
    folder: Path,
    *,
    field: str,
    vocab_size: int,
    temperature: float,
    device: torch.device,
    on_meta: bool = False,
    attention: Attention = Attention.AUTO,
) -> PreTrainedModel:
    """Load a frozen model, e.g. of the `field` algorithm.reference, in fp32 on `device`, with the packed forward.

    With `on_meta` it has no weights until `sharding.shard` fills them in. Raises `ConfigError` if the folder holds
    no usable model, or its vocabulary has fewer tokens than the policy's `vocab_size`; a reference has as many.
    """
    source = ModelConfig(path=folder)
    check_model_folder(source, field=field)
    model = load_policy(
        source, seed=0, temperature=temperature, device=device, on_meta=on_meta, attention=attention
    )
    rows = model.config.vocab_size
    if rows < vocab_size or (rows > vocab_size and field != TEACHER):
        raise ConfigError(
            f"{field}={folder}: has a vocabulary of {rows} tokens, the policy"
            f" one of {vocab_size}; name a model with the policy's tokenizer"
        )
    model.requires_grad_(False)
    model.router_replay = None  # it chooses its own experts
    return model


def load_policy(
    settings: ModelConfig,
    *,
    seed: int,
    temperature: float,
    device: torch.device,
    on_meta: bool = False,
    attention: Attention = Attention.AUTO,
) -> PreTrainedModel:
    """Load the model in the folder `settings.path`, in fp32 on `device`, with the packed forward.

    With `settings.from_scratch` the weights are drawn from `seed`. With `on_meta` the model has no weights until
    `sharding.shard` fills them in. `model.attention_choice` has the kernel in use. Raises `ConfigError` if the
    folder holds no usable model, `temperature` is not above 0, or the kernel `attention` cannot be used.
    """
    check_model_folder(settings)
    if temperature <= 0:
        raise ConfigError(
            f"rollout.sampling.temperature={temperature}: the learner divides logits by it; set it above 0"
        )
    logging.disable_progress_bar()  # it would fill the log of a process that has no terminal
    try:
        config = AutoConfig.from_pretrained(settings.path)
        choice = _choose(config, attention, device)
        options = {"attn_implementation": register_kernel(choice.kernel), "dtype": torch.float32}
        if is_mixture(config):
            options["experts_implementation"] = register_experts()
        model = _load(settings, seed=seed, options=options, on_meta=on_meta)
    except ConfigError:
        raise
    except ValueError as error:  # transformers raises it for a model that it does not know
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model.path={settings.path}: transformers cannot load it ({reason}); name a causal language model"
        ) from error
    if not settings.from_scratch and model.config.get_text_config().tie_word_embeddings:
        check_tied_head(settings.path)
    if device.type == "cuda":
        fuse_norms(model)
    if is_mixture(model.config):
        model.router_replay = RouterReplay(model)
    model.forward = types.MethodType(_packed_forward(partial(_read_tokens, temperature=temperature)), model)
    model.attention_choice = choice
    model.context = None  # `Learner` sets it where ranks share rows
    model.compute_device = device  # `model.device` is the host's where FSDP offloads to it
    # Evaluation mode: the new log-probabilities must follow from the weights alone, without dropout.
    return model.eval() if on_meta else model.to(device).eval()


def add_value_head(model: PreTrainedModel) -> None:
    """Make a policy, which `load_policy` returned, a value model: its output embedding is one row of zeros.

    So each value is 0 until the first update of the head.
    """
    head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
    nn.init.zeros_(head.weight)
    model.set_output_embeddings(head.to(model.compute_device))
    model.forward = types.MethodType(_packed_forward(_read_values), model)
    model.router_replay = None  # the critic chooses its own experts


def _choose(config: PretrainedConfig, wanted: Attention, device: torch.device) -> Choice:
    """Choose the kernel for a model's heads."""
    sizes = config.get_text_config()
    heads = sizes.num_attention_heads
    head_dim = getattr(sizes, "head_dim", None) or sizes.hidden_size // heads
    return choose_kernel(wanted, device=device, heads=heads, kv_heads=kv_heads(config), head_dim=head_dim)


def kv_heads(config: PretrainedConfig) -> int:
    """Number of key-value heads of a model with this config."""
    sizes = config.get_text_config()
    return int(getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads)


def _load(settings: ModelConfig, *, seed: int, options: Mapping[str, object], on_meta: bool) -> PreTrainedModel:
    """Read the model in fp32, draw it from `seed`, or leave its weights on the meta device.

    `options` go to transformers. Raises `ConfigError` if the files lack a weight, which
    transformers would draw at random.
    """
    if settings.from_scratch or on_meta:
        config = AutoConfig.from_pretrained(settings.path)
        with torch.random.fork_rng(devices=[]), torch.device("meta" if on_meta else "cpu"):
            torch.manual_seed(seed)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
        make_buffers(model)
        return model
    model, loading = AutoModelForCausalLM.from_pretrained(
        settings.path, local_files_only=True, output_loading_info=True, **options
    )
    if loading["missing_keys"]:
        raise missing_weight(settings.path, min(loading["missing_keys"]))
    return model


def is_mixture(config: PretrainedConfig) -> bool:
    """True for the config of a mixture-of-experts model."""
    return bool(getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None))


def check_model_folder(settings: ModelConfig, *, field: str = "model.path") -> None:
    """Raise `ConfigError`, which names `field`, unless the folder has a config, a tokenizer and needed weights."""
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
    """Run a model on a microbatch; returns each label's log-probability and each row's entropy, fp32 [T] each.

    Both are at the model's temperature, over the recorded sampling masks and with the recorded experts, if any.
    With `rows` [N], ascending, only these rows go through the output embedding, and the results are [N]: a loss
    needs no rows of prompts.
    """
    labels = torch.tensor(batch.labels, dtype=torch.long, device=model.compute_device)
    logprobs, entropy = _forward(model, batch, rows, labels if rows is None else labels[rows])
    return logprobs, entropy


def state_values(model: PreTrainedModel, batch: MicroBatch, rows: Tensor) -> Tensor:
    """Return a value model's values of the states at `rows` [N], ascending, of a microbatch, fp32 [N]."""
    (values,) = _forward(model, batch, rows, None)
    return values


def next_logprobs(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return the distribution of the token after each of the S sequences of a microbatch, fp32 [S, V] in logs."""
    rows = torch.tensor(batch.cu_seqlens[1:] - 1, dtype=torch.long, device=model.compute_device)
    with torch.no_grad():
        return _forward(model, batch, rows, None)[0]


def _forward(
    model: PreTrainedModel, batch: MicroBatch, rows: Tensor | None, labels: Tensor | None
) -> tuple[Tensor, ...]:
    """Run the packed forward on a microbatch, with the recorded experts, if any."""
    device, context = model.compute_device, model.context
    replay: RouterReplay | None = getattr(model, "router_replay", None)
    if replay is not None:
        replay.force(batch, device=device, context=context)
    input_ids, position_ids, cu_seqlens = batch.input_ids, batch.position_ids, batch.cu_seqlens
    key_rows, seen = (None, batch.lengths) if batch.parents is None else batch.key_rows
    if context is not None:
        if rows is None:
            rows = torch.arange(len(input_ids), device=device)
        first, last = context.piece(len(input_ids))
        is_mine = (first <= rows) & (rows < last)
        rows, labels = rows[is_mine], None if labels is None else labels[is_mine]
        input_ids, position_ids = context.padded(input_ids), context.padded(position_ids)
        padding = context.size * (last - first) - len(batch.input_ids)
        if padding:  # a sequence of its own
            cu_seqlens, seen = np.append(cu_seqlens, cu_seqlens[-1] + padding), [*seen, padding]
            if key_rows is not None:
                key_rows = np.append(key_rows, np.arange(padding) + batch.num_tokens)
    outputs: tuple[Tensor, ...] = model(
        input_ids=torch.tensor(input_ids, dtype=torch.long, device=device),
        position_ids=torch.tensor(position_ids, dtype=torch.long, device=device),
        rows=rows if context is None or rows is None else rows - first,
        labels=labels,
        segments=Segments.of(np.diff(cu_seqlens).tolist(), seen, device=device),
        key_rows=None if key_rows is None else torch.tensor(key_rows, dtype=torch.long, device=device),
        support=None if labels is None else _support(batch, rows, device),
        context=context,
    )
    if context is None:
        return outputs
    return tuple(context.combine(values, is_mine) for values in outputs)


def _support(batch: MicroBatch, rows: Tensor | None, device: torch.device) -> Support | None:
    """Return the ids among which the engine sampled the tokens at `rows`; None if the batch records none."""
    if batch.support is None:
        return None
    counts, ids = batch.support.counts, batch.support.ids
    if rows is not None:
        chosen = np.zeros(len(counts), dtype=np.bool_)
        chosen[rows.cpu().numpy()] = True
        counts, ids = counts[chosen], ids[np.repeat(chosen, counts)]
    return Support.build(counts, ids, device=device)


def _packed_forward(read: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Make a forward that replaces the model's own before FSDP hooks it to gather the embedding.

    `read` makes the results from hidden states and the weight of the head.
    """

    def forward(
        model: PreTrainedModel,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        rows: Tensor | None,
        labels: Tensor | None,
        segments: Segments,
        key_rows: Tensor | None,
        support: Support | None,
        context: Context | None,
    ) -> tuple[Tensor, ...]:
        """Return the results of `read` for `rows`, by default for all rows."""
        hidden = model.base_model(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            cu_seq_lens_q=segments.cu_queries,
            cu_seq_lens_k=segments.cu_keys,
            max_length_q=segments.longest_query,
            max_length_k=segments.longest_key,
            key_rows=key_rows,
            context=context,
        ).last_hidden_state[0]
        if rows is not None:
            hidden = hidden.index_select(0, rows)
        return read(hidden, model.get_output_embeddings().weight, labels, support)

    return forward


def _read_tokens(
    hidden: Tensor, head: Tensor, labels: Tensor | None, support: Support | None, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of `labels` and entropies, [N] each.

    Without `labels` both results are the log-probabilities of all tokens, [N, V].
    """
    if labels is None:  # the whole distribution at each row
        logprobs = (hidden @ head.t()).float().div_(temperature).log_softmax(-1)
        return logprobs, logprobs
    return token_logprobs(hidden, head, labels, temperature=temperature, support=support)


def _read_values(hidden: Tensor, head: Tensor, labels: None, support: None) -> tuple[Tensor]:
    """Return the values [N] of states, in fp32 also where the layers compute in bf16."""
    return (torch.mv(hidden.float(), head.float()[0]),)


def gather_full(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in full and contiguous; floats are cast to `dtype` before the gather. Collective.

    A shard that FSDP keeps on the host is gathered on the mesh's device, by NCCL instead of gloo.
    """
    cast = (tensor.to(dtype) if tensor.is_floating_point() else tensor).detach()
    if not isinstance(cast, DTensor):
        return cast.contiguous()
    moved = cast.to(cast.device_mesh.device_type) if cast.device_mesh.size() > 1 else cast
    assert isinstance(moved, DTensor), "a moved shard is a shard"
    return moved.full_tensor().contiguous()


def fingerprint(tensors: Sequence[Tensor]) -> str:
    """Hash over a few values of each tensor: the first, the last and one between."""
    flat = [tensor.detach().flatten() for tensor in tensors if tensor.numel()]
    values = torch.cat([values[:: max(1, len(values) // SAMPLED)].float() for values in flat])
    digest: str = blake3(values.cpu().numpy().tobytes()).hexdigest(length=8)
    return digest


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
