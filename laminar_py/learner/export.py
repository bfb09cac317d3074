"""Export of weights under their Hugging Face names, one by one or as a folder for transformers.

`step`, `warm_start`, and `orchestrator.exports` for `laminar export`, call it. A version is published by rows:
FSDP shards a parameter by rows, and in a file successive rows are one range of bytes, so each rank writes its own
(`tests/learner/test_publish.py`). Where a tensor has no such rows, every rank gathers it. In an exported folder
`AutoTokenizer` gives the same ids as the run's tokenizer (`tests/learner/test_export.py`).
"""

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import LoraConfig
from laminar_py.learner.checkpoint import load_weights
from laminar_py.learner.model import check_model_folder, gather_full, is_mixture
from laminar_py.learner.sharding import rows_of
from laminar_py.records.host import sync
from laminar_py.records.weights import Rows, StoredTensor, TensorSource

SHARD_BYTES = 5_000_000_000  # largest file of weights, unless a single weight is larger
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


@dataclass(frozen=True, slots=True)
class _StoredRows:
    """A tensor of the files, which is some rows of a tensor in memory, whose leading dimensions are flattened.

    E.g. `_StoredRows("experts.3.up_proj.weight", (768, 2048), range(5376, 6144))` of a `gate_up_proj`.
    """

    name: str
    shape: tuple[int, ...]
    rows: range


class WeightExporter:
    """Gives the weights of a model as a version's files have them, e.g. `WeightExporter(model)`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._tied = every - {name for name, _ in model.named_parameters()}
        # transformers keeps experts as one tensor in memory, and as one for each in files
        self._converts = is_mixture(model.config)
        self._pieces: dict[str, tuple[list[_StoredRows], bool]] = {}  # see `_pieces_of`, which takes a millisecond

    def sources(self, *, dtype: torch.dtype, gather: bool, writes_whole: bool = True) -> list[TensorSource]:
        """Return the sources of all weights, floats to be cast to `dtype`; a tied weight once, by its first name.

        A source yields rows that this rank holds: its own memory, not yet cast. With `gather`, and where rows in
        memory are no rows of a file, every rank gathers the tensor instead, cast before. Only ranks with
        `writes_whole` yield a gathered tensor, or a tensor that all ranks have. All ranks must read all sources in
        this order.
        """
        return [
            self._source(name, tensor, dtype, gather=gather, writes_whole=writes_whole)
            for name, tensor in self._model.state_dict().items()
            if name not in self._tied
        ]

    def _source(
        self, name: str, tensor: Tensor, dtype: torch.dtype, *, gather: bool, writes_whole: bool
    ) -> TensorSource:
        """Make the source of one tensor in memory."""
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        pieces, are_rows = self._pieces_of(name, tuple(tensor.shape))
        held = _held_rows(tensor) if are_rows else None
        is_sharded = isinstance(tensor, DTensor)

        def read_rows() -> Iterator[Rows]:
            assert held is not None, f"{name} is not held by rows"
            first, rows = held
            last = first + len(rows)
            rows = rows.to(wanted) if rows.is_cuda else rows  # by one kernel, not one for each expert
            for piece in pieces if writes_whole or is_sharded else ():
                begin, end = max(first, piece.rows.start), min(last, piece.rows.stop)
                if begin < end and rows.numel():
                    place = (begin - piece.rows.start) * rows.shape[1]
                    yield piece.name, place, rows[begin - first : end - first]

        def read_whole() -> Iterator[Rows]:
            full = gather_full(tensor, wanted)
            values = revert_weight_conversion(self._model, {name: full}) if self._converts else {name: full}
            for own_name, value in values.items() if writes_whole else ():
                yield own_name, 0, value

        stored = tuple(StoredTensor(piece.name, wanted, piece.shape) for piece in pieces)
        gathers = held is None or (gather and is_sharded)
        return TensorSource(stored, read_whole if gathers else read_rows)

    def _pieces_of(self, name: str, shape: tuple[int, ...]) -> tuple[list[_StoredRows], bool]:
        """Return what a tensor becomes in the files, and whether each part has successive rows of the tensor."""
        if name not in self._pieces:
            num_rows = math.prod(shape[:-1] if len(shape) > 1 else shape)
            if self._converts:
                self._pieces[name] = self._converted(name, shape, num_rows)
            else:
                self._pieces[name] = [_StoredRows(name, shape, range(num_rows))], True
        return self._pieces[name]

    def _converted(self, name: str, shape: tuple[int, ...], num_rows: int) -> tuple[list[_StoredRows], bool]:
        """Find the pieces of a tensor by a conversion of numbered rows with two columns."""
        made = revert_weight_conversion(self._model, {name: torch.empty(shape, device="meta")})
        if len(shape) < 2 or shape[-1] < 2:
            pieces = [_StoredRows(own, tuple(one.shape), range(num_rows)) for own, one in made.items()]
            return pieces, len(pieces) == 1
        numbered = torch.arange(2 * num_rows).reshape(*shape[:-1], 2)
        found = revert_weight_conversion(self._model, {name: numbered})
        pieces, are_rows = [], True
        for own, one in made.items():
            number = found[own].reshape(-1)
            first, count = int(number[0]) // 2, len(number) // 2
            same = torch.equal(number, torch.arange(2 * first, 2 * (first + count)))
            are_rows &= same and tuple(one.shape) == (*found[own].shape[:-1], shape[-1])
            pieces.append(_StoredRows(own, tuple(one.shape), range(first, first + count)))
        return pieces, are_rows


def _held_rows(tensor: Tensor) -> tuple[int, Tensor] | None:
    """Return the first row that this rank holds, and its rows [n, last dimension]; None if it holds no rows.

    Rows are counted over all dimensions but the last; in one dimension each element is a row.
    """
    first, local = 0, tensor
    if isinstance(tensor, DTensor):
        rows = rows_of(tensor)
        if rows is None:
            return None
        first, local = rows.start, tensor.to_local()
        assert len(local) == len(rows), f"this rank holds {len(local)} rows, not {len(rows)}"
    if not local.is_contiguous():
        return None
    last = tensor.shape[-1] if tensor.ndim > 1 else 1
    return first * math.prod(tensor.shape[1:-1]), local.reshape(-1, last)


def full_tensors(sources: Sequence[TensorSource]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of sources that yield each tensor in full: contiguous, and cast.

    Only one full tensor exists at a time. It may alias the model's own memory, so read it before the next step.
    """
    for source in sources:
        stored = {one.name: one for one in source.stored}
        for name, _, values in source.read():
            yield name, values.to(stored[name].dtype).reshape(stored[name].shape).contiguous()


def export_hf(model: PreTrainedModel, folder: Path, *, source: Path, dtype: torch.dtype) -> None:
    """Write an unsharded model as a new Hugging Face folder, with config and tokenizer files from `source`.

    Casts the model to `dtype` in place, weight by weight, and writes one file of weights after the other.
    """
    logging.disable_progress_bar()
    folder.mkdir(parents=True)
    model.generation_config = GenerationConfig()  # transformers refuses to write some that it reads
    model.to(dtype).save_pretrained(folder, max_shard_size=SHARD_BYTES)
    (folder / GENERATION_CONFIG).unlink()  # the source's follows, if it has one
    config = model.config.__class__.from_pretrained(source)
    config.dtype = dtype
    config.save_pretrained(folder)
    _add_tokenizer(folder, source, config)


def _add_tokenizer(folder: Path, source: Path, config: PretrainedConfig) -> None:
    """Add the tokenizer of `source` to a folder of weights, and give the weights the modes of its other files."""
    for file in TOKENIZER_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, folder / file)
    settings = folder / TOKENIZER_CONFIG
    settings.write_bytes(_tokenizer_config(source, config))
    for weights in folder.glob("*.safetensors"):  # safetensors lets only their owner read them
        weights.chmod(settings.stat().st_mode)


def _set_stop_ids(folder: Path, stop_ids: tuple[int, ...], source: Path) -> None:
    """Set `eos_token_id` to `stop_ids` in a folder's `generation_config.json`.

    A missing file gets its other ids from the config of `source`.
    """
    path = folder / GENERATION_CONFIG
    if path.is_file():
        settings = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    else:
        config = msgspec.json.decode((source / "config.json").read_bytes(), type=dict[str, object])
        names = ("bos_token_id", "pad_token_id")
        settings = {name: config[name] for name in names if config.get(name) is not None}
    settings["eos_token_id"] = stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(settings), indent=2) + b"\n")


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):  # the part of `tokenizer.json` that names special tokens
    added_tokens: list[_AddedToken] = []


def _tokenizer_config(source: Path, config: PretrainedConfig) -> bytes:
    """Return the tokenizer config of `source`; if the config names no class, add one for `tokenizer.json`.

    Without a class transformers would take the class for the `model_type`, which may split text differently. Then
    the special tokens come from the ids in the model's `config`.
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
        contents = [names[index] for index in (ids if isinstance(ids, list) else [ids]) if index in names]
        if contents:
            settings.setdefault(name, contents[0])
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
    adapter: bool = False,
    stop_ids: tuple[int, ...] = (),
) -> None:
    """Write a checkpoint of the model in `source` as a Hugging Face folder, e.g. in `bfloat16`.

    With `lora` the checkpoint's adapters are merged into the model in `base`, by default `source`; as an `adapter`
    they are written alone, as peft reads them. Works on the CPU, with memory for the model in fp32, for a
    checkpoint of any world size. `folder` must not exist yet, and appears only when it is complete. Engines that
    load `folder` stop at `stop_ids`; without any, at the ids in `source`. Raises `ConfigError` if the checkpoint
    is incomplete or of another model, or the base has no weights.
    """
    check_model_folder(ModelConfig(path=source, from_scratch=True))  # its weights are not needed
    logging.disable_progress_bar()
    cast = getattr(torch, dtype)
    with _complete_folder(folder) as partial:
        if adapter:
            from laminar_py.learner.lora import write_adapter  # imports peft, which is an extra

            assert lora is not None, "only a run of adapters has an adapter"
            write_adapter(checkpoint, partial, base=base or source, settings=lora, dtype=cast)
            _add_tokenizer(partial, source, AutoConfig.from_pretrained(source))
        else:
            model = _load_checkpoint(checkpoint, source=source, lora=lora, base=base or source)
            export_hf(model, partial, source=source, dtype=cast)
        if stop_ids:
            _set_stop_ids(partial, stop_ids, source)


def _load_checkpoint(checkpoint: Path, *, source: Path, lora: LoraConfig | None, base: Path) -> PreTrainedModel:
    """Load the whole model of a checkpoint, adapters merged, in fp32 on the CPU."""
    if lora is None:
        config = AutoConfig.from_pretrained(source)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.to_empty(device="cpu")
        model.tie_weights()
        load_weights(checkpoint, model)
        return model
    from laminar_py.learner.lora import load_merged  # imports peft, which is an extra

    return load_merged(checkpoint, base=base, settings=lora)


@contextmanager
def _complete_folder(folder: Path) -> Iterator[Path]:
    """Context that gives a path for a new folder, and then renames it to `folder` once all is on disk."""
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            sync(path)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after an error; else it was renamed
    sync(folder.parent)
