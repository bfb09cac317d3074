"""Weights out of the learner, under their Hugging Face names, and whole folders for transformers.

Called by the relay's publisher, by `warm_start`, and for `laminar export` by `orchestrator.exports`. Invariants:
every rank iterates in the same order, because a sharded tensor is gathered from all of them; in an exported folder
`AutoTokenizer` makes of a prompt the ids that the run made of it.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import LoraConfig
from laminar_py.learner.checkpoint import load_weights
from laminar_py.learner.model import check_model_folder, gathered, is_mixture
from laminar_py.records.disk import sync

TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    GENERATION_CONFIG,
)


def named_tensors(model: PreTrainedModel, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Each weight in full and contiguous, floats cast to `dtype`; a tied weight comes once, under its first name.

    Tensor by tensor: the shard is cast before it is gathered, and only one full tensor need exist at a time.
    It may alias the model's own memory: read it before the next step.
    """
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = every - {name for name, _ in model.named_parameters()}
    mixture = is_mixture(model.config)
    for name, tensor in model.state_dict().items():
        if name not in tied:
            full = gathered(tensor, dtype)
            # experts are one tensor in memory, and one for each in files
            stored = revert_weight_conversion(model, {name: full}) if mixture else {name: full}
            for own_name, values in stored.items():
                yield own_name, values.contiguous()


def export_hf(
    model: PreTrainedModel, folder: Path, *, source: Path, dtype: torch.dtype, writes: bool = True
) -> None:
    """A plain Hugging Face folder: config, the tokenizer files of `source`, `model.safetensors`.

    Collective: all ranks call it, the one that `writes` makes the files. `folder` must not exist yet.
    """
    weights = {}
    for name, tensor in named_tensors(model, dtype=dtype):
        if writes:
            weights[name] = tensor
    if not writes:
        return
    folder.mkdir(parents=True)
    config = model.config.__class__.from_pretrained(source)
    config.dtype = dtype
    config.save_pretrained(folder)
    for file in TOKENIZER_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, folder / file)
    (folder / TOKENIZER_CONFIG).write_bytes(_tokenizer_config(source, config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _name_ends(folder: Path, stop_ids: tuple[int, ...]) -> None:
    """Have `generation_config.json` of an exported folder name these ids as those that end a response."""
    path = folder / GENERATION_CONFIG
    if path.is_file():
        settings = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    else:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, object])
        names = ("bos_token_id", "pad_token_id")
        settings = {name: config[name] for name in names if config.get(name) is not None}
    settings["eos_token_id"] = stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(settings), indent=2) + b"\n")


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _tokenizer_config(source: Path, config: PretrainedConfig) -> bytes:
    """The file of `source` where it names a class, else one by which transformers reads `tokenizer.json` itself.

    Without a class it takes that of the `model_type`, which may split text in a way of its own.
    """
    path = source / TOKENIZER_CONFIG
    written = path.read_bytes() if path.is_file() else b"{}"
    settings = msgspec.json.decode(written, type=dict[str, object])
    if settings.get("tokenizer_class") or settings.get("auto_map"):
        return written
    tokens = msgspec.json.decode((source / "tokenizer.json").read_bytes(), type=_TokenizerFile).added_tokens
    names = {token.id: token.content for token in tokens}
    for name in ("bos_token", "eos_token", "pad_token"):
        ids = getattr(config, f"{name}_id", None)
        found = [names[index] for index in (ids if isinstance(ids, list) else [ids]) if index in names]
        if found:
            settings.setdefault(name, found[0])
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    return msgspec.json.format(msgspec.json.encode(settings), indent=2) + b"\n"


def export_checkpoint(
    checkpoint: Path,
    folder: Path,
    *,
    source: Path,
    dtype: str,
    lora: LoraConfig | None = None,
    base: Path | None = None,
    stop_ids: tuple[int, ...] = (),
) -> None:
    """A checkpoint of the model in `source` as a plain Hugging Face folder, e.g. in `bfloat16`.

    With `lora` its adapters are merged into `base`, or into `source`. On the CPU, with memory for the model in
    fp32 and in `dtype`; whatever its world size was. `folder` must not exist yet, and is there only when it is
    complete. Other engines stop at `stop_ids`, or without any where `source` says. Raises `ConfigError` if the
    checkpoint is torn or of another model, or the base has no weights.
    """
    check_model_folder(ModelConfig(path=source, from_scratch=True))  # its weights are not needed
    model = _restored(checkpoint, source) if lora is None else _merged(checkpoint, base or source, lora)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        export_hf(model, partial, source=source, dtype=getattr(torch, dtype))
        if stop_ids:
            _name_ends(partial, stop_ids)
        for path in (*partial.iterdir(), partial):
            sync(path)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # if it could not be completed
    sync(folder.parent)


def _restored(checkpoint: Path, source: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to_empty(device="cpu")
    model.tie_weights()
    load_weights(checkpoint, model)
    return model


def _merged(checkpoint: Path, base: Path, lora: LoraConfig) -> PreTrainedModel:
    from laminar_py.learner.lora import merged

    return merged(checkpoint, base=base, settings=lora)
