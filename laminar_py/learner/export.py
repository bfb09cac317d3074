"""Weights out of the learner, under their Hugging Face names. Called by the relay's publisher and by `warm_start`.

Invariant: every rank iterates in the same order, because a sharded tensor is gathered from all of them.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from laminar_py.learner.model import is_mixture
from laminar_py.learner.optimizer import PARTITION

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
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
        if name not in tied and not name.startswith(PARTITION):
            cast = tensor.to(dtype) if tensor.is_floating_point() else tensor
            full = (cast.full_tensor() if isinstance(cast, DTensor) else cast).detach()
            # experts are one tensor in memory, and one for each in files
            parts = revert_weight_conversion(model, {name: full}) if mixture else {name: full}
            for part, values in parts.items():
                yield part, values.contiguous()


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
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
