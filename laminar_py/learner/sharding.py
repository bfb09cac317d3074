"""Sharding of a model over the ranks of a mesh by FSDP2; each rank reads only the weights of its own shards.

`step` and `reference` call it. A rank whose model is on the meta device never holds more fp32 weights than its own
shards and one tensor, on the host or on a GPU (`tests/learner/test_shards.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import ReduceDtype
from laminar_py.config.section import ConfigError
from laminar_py.learner.model_folder import missing_weight

ReadRows = Callable[[int, int], Tensor]
"""Function that reads rows [first, last) of a weight."""


def shard(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    source: ModelConfig,
    seed: int = 0,
    offload: bool = False,
    reduce_dtype: ReduceDtype = ReduceDtype.FLOAT32,
) -> None:
    """Shard a model over the last dimension of `mesh`: each layer, then the rest. Another dimension has copies.

    Gradients are summed over all ranks, in `reduce_dtype`. On CUDA the layers compute in bf16, on a CPU in fp32.
    With `offload`, parameters and gradients are in the host's memory between their uses. Parameters on the meta
    device get the weights in `source`, or weights drawn from `seed`. Raises `ConfigError` for a model without
    layers, or whose files lack a weight.
    """
    on_gpu = mesh.device_type == "cuda"
    computes_in = torch.bfloat16 if on_gpu else None
    precision = MixedPrecisionPolicy(param_dtype=computes_in, reduce_dtype=getattr(torch, reduce_dtype))
    where = CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()
    layers = list(getattr(model.base_model, "layers", ()))
    if not layers:
        raise ConfigError(
            f"model.path={model.name_or_path}: a {model.config.model_type} model has no list `layers`, whose"
            " members FSDP shards; train a decoder of transformers that has one, or set learner.world_size=1 on a"
            " CPU"
        )
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=where)
    # Neither setting is recursive, and a module without them would divide its gradients by the world size.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    device = torch.device("cpu" if offload else mesh.device_type)
    if source.from_scratch:
        _fill_drawn(model, seed, device)
    else:
        with _Files(source.path) as files:
            _fill_read(model, files, device)


# ---- models on the meta device


def make_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers of a model on the meta device in memory, e.g. rotary frequencies; no file holds them."""
    for module in model.modules():
        absent = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        for name, buffer in absent.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        if absent:
            model._init_weights(module)


@contextmanager
def placeholder_weights(model: nn.Module) -> Iterator[None]:
    """Replace meta weights by host weights that take no memory, inside the block.

    peft puts an adapter on the device of the weight beside it; on the meta device the adapter would lose its
    values.
    """
    absent = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    for module, name, parameter in absent:
        placeholder = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        module.register_parameter(name, nn.Parameter(placeholder, requires_grad=parameter.requires_grad))
    try:
        yield
    finally:
        for module, name, parameter in absent:
            parameter.requires_grad_(getattr(module, name).requires_grad)
            module.register_parameter(name, parameter)


# ---- weights of a shard


def _fill_read(model: PreTrainedModel, files: "_Files", device: torch.device) -> None:
    """Replace each meta parameter by this rank's shard on `device`, read from `files`; also read the buffers."""
    made: dict[int, nn.Parameter] = {}  # by id of the meta parameter: a tied weight has several names
    for prefix, module in model.named_modules():
        for local_name, parameter in list(module.named_parameters(recurse=False)):
            name = f"{prefix}.{local_name}".replace(".base_layer.", ".")  # peft's name for a layer that it adapts
            if parameter.is_meta and id(parameter) not in made:
                made[id(parameter)] = _empty_shard(parameter, device)
                _fill_shard(made[id(parameter)], files.row_reader(model, name, parameter.shape))
            if parameter.is_meta:
                module.register_parameter(local_name, made[id(parameter)])
    for name, buffer in model.named_buffers():
        if name in files.file_of:
            buffer.copy_(files.read(name))


def _fill_drawn(model: PreTrainedModel, seed: int, device: torch.device) -> None:
    """Replace each meta parameter by this rank's shard on `device`, with weights drawn from `seed`.

    Every rank draws full tensors, one module at a time, so the weights do not depend on the number of ranks. A
    shard is allocated before its full tensor, so that the freed tensor leaves no hole between shards.
    """
    made: dict[int, nn.Parameter] = {}  # by id of the meta parameter
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in model.modules():
            absent = {name: p for name, p in module.named_parameters(recurse=False) if p.is_meta}
            fresh = [name for name, parameter in absent.items() if id(parameter) not in made]
            made |= {id(absent[name]): _empty_shard(absent[name], device) for name in fresh}
            for name in fresh:
                module.register_parameter(name, nn.Parameter(torch.empty(absent[name].shape)))
            if fresh:
                model._init_weights(module)
            for name, parameter in absent.items():
                if name in fresh:
                    rows = getattr(module, name).data
                    _fill_shard(made[id(parameter)], lambda first, last: rows[first:last])  # noqa: B023 - at once
                module.register_parameter(name, made[id(parameter)])


def _empty_shard(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Make a copy of a sharded meta parameter with memory for this rank's rows, but without values."""
    like = parameter.data
    assert isinstance(like, DTensor), f"a parameter {tuple(like.shape)} on the meta device is not sharded"
    assert rows_of(like) is not None, f"a parameter is sharded as {like.placements}, not by rows"
    local = torch.empty(like.to_local().shape, dtype=like.dtype, device=device)
    values = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _fill_shard(shard: nn.Parameter, read_rows: ReadRows) -> None:
    """Read this rank's rows of a weight into its shard: the rows of its part by `torch.chunk`, or none."""
    values = shard.data
    assert isinstance(values, DTensor)
    local, rows = values.to_local(), rows_of(values)
    if local.numel() and rows is not None:
        local.copy_(read_rows(rows.start, rows.stop))


def rows_of(values: DTensor) -> range | None:
    """Return the rows that this rank holds: its part by `torch.chunk`, maybe none. None if not sharded by rows."""
    *copied, sharded = values.placements
    if sharded != Shard(0) or any(one != Replicate() for one in copied):
        return None
    mesh, length = values.device_mesh, values.shape[0]
    dimension = mesh.ndim - 1  # over which the rows are divided
    each = -(-length // mesh.size(dimension))
    first = min(length, mesh.get_local_rank(dimension) * each)
    return range(first, min(length, first + each))


class _Files:
    """The open safetensors files of a folder; rows of a tensor are read on demand."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open = ExitStack()
        self.file_of: dict[str, Any] = {}  # name of a tensor -> the open file that has it

    def __enter__(self) -> "_Files":
        for path in sorted(self._folder.glob("*.safetensors")):
            file = self._open.enter_context(safe_open(path, framework="pt"))
            self.file_of |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self, name: str) -> Tensor:
        """Read a tensor in full."""
        tensor: Tensor = self.file_of[name].get_tensor(name)
        return tensor

    def row_reader(self, model: PreTrainedModel, name: str, shape: Sequence[int]) -> ReadRows:
        """Return a function that reads rows of parameter `name`, which has this full shape.

        The files may hold the parameter under another name, or in one tensor or several for each expert. Raises
        `ConfigError` if the files lack it.
        """
        base = f"{model.base_model_prefix}."
        for stored in (name, name.removeprefix(base)):
            if stored in self.file_of:
                return lambda first, last: self._slice(stored, first, last)
        pieces = list(revert_weight_conversion(model, {name: torch.empty(tuple(shape), device="meta")}))
        missing = next((piece for piece in pieces if piece not in self.file_of), None)
        if missing is not None:
            raise missing_weight(self._folder, missing)
        if len(pieces) == 1:
            return lambda first, last: self._slice(pieces[0], first, last)
        names = _names_by_expert(model, name, pieces, num_experts=shape[0])
        return lambda first, last: torch.stack(
            [torch.cat([self.read(piece) for piece in names[expert]]) for expert in range(first, last)]
        )

    def _slice(self, name: str, first: int, last: int) -> Tensor:
        rows: Tensor = self.file_of[name].get_slice(name)[first:last]
        return rows


def _names_by_expert(
    model: PreTrainedModel, name: str, pieces: Sequence[str], *, num_experts: int
) -> list[list[str]]:
    """Return, for each expert, the names of its matrices in the files, in the order of the fused tensor `name`.

    transformers splits a tensor of numbered rows into `pieces`; the number in a piece gives its place.
    """
    each = len(pieces) // num_experts
    numbered = torch.arange(num_experts * each).reshape(num_experts, each, 1)
    places: Mapping[str, Tensor] = revert_weight_conversion(model, {name: numbered})
    whole = all(place.numel() == 1 for place in places.values())
    assert whole, f"{name}: transformers splits a matrix of an expert into several tensors"
    order = sorted(pieces, key=lambda piece: int(places[piece]))
    return [order[start : start + each] for start in range(0, len(order), each)]
