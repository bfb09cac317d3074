"""Weights of the embedded engine, packed for its forward. Owns the mapping from Hugging Face names.

`LocalModel` calls it. Matrices are stored transposed and fused, since `x @ w` on a contiguous `[in, out]` is the
fastest product on a CPU at decoding sizes. The two halves of a query or key head are interleaved, so that rotary
embedding is one complex product. Queries and keys have the same order, so scores do not change. All tensors are
copies, so the folder of a version may be deleted after a load.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from laminar_py.engines.local import fp8
from laminar_py.engines.local.spec import ModelSpec
from laminar_py.records.engine import RefusedError
from laminar_py.records.proofs import WeightsChecksum


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm over the last dimension D, `x * weight / sqrt(mean(x^2) + eps)`.

    It computes the root as a hypotenuse, sqrt(sum of squares + D eps), with half the operations of `F.rms_norm` on
    a CPU. The weight is kept as well, since two weights one rounding apart may have the same product.
    """

    weight: Tensor  # [..., D] fp32
    scale: Tensor  # [..., D] fp32, the weight times sqrt(D)
    floor: Tensor  # [] fp32, sqrt(D * eps)

    @classmethod
    def from_weight(cls, weight: Tensor, *, eps: float) -> Self:
        """Build from `weight [..., D]`, which broadcasts over the input."""
        size = weight.shape[-1]
        exact = weight.to(torch.float32, copy=True)
        return cls(exact, exact * math.sqrt(size), torch.tensor(math.sqrt(size * eps)))

    def rows(self, start: int, end: int | None = None) -> Self:
        """Return views of some rows of `weight [rows, D]`, of heads for example."""
        return replace(self, weight=self.weight[start:end], scale=self.scale[start:end])

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise `x [..., D]`; keeps its dtype."""
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / length.hypot_(self.floor)).mul_(self.scale).to(x.dtype)


class FileView:
    """A view of served values in the order of a tensor in the files, e.g. `FileView(head.t())`.

    `copies` of each value lie `step` apart. A served value is `scale` times the value in the files.
    """

    def __init__(self, values: Tensor, *, scale: float = 1.0, copies: int = 1, step: int = 0) -> None:
        self.numel = values.numel()
        self._scale = scale
        self._copies = step * torch.arange(copies) if copies > 1 else None
        last = sum((size - 1) * step for size, step in zip(values.shape, values.stride(), strict=True))
        self._memory = values.as_strided((last + (copies - 1) * step + 1,), (1,))
        # A place's index is the sum over dimensions of `place // inner` times a factor: the dimension's step, less
        # the steps that the next dimension makes over its whole size.
        sizes, steps, inner = values.shape, values.stride(), 1
        self._step = steps[-1]
        self._factors: list[tuple[int, int]] = []  # (inner, factor) of the other dimensions
        for dim in range(values.dim() - 1, 0, -1):
            inner *= sizes[dim]
            if factor := steps[dim - 1] - sizes[dim] * steps[dim]:
                self._factors.append((inner, factor))

    def put(self, at: Tensor, to: Tensor) -> None:
        """Serve the values `to [n]` at the flat places `at [n]` of the tensor in the files."""
        index, served = at, to.to(self._memory.dtype)
        if self._scale != 1:
            served = served * self._scale
        if self._factors or self._step != 1:
            exact = at.double()  # exact here, and four times as fast to divide as integers
            total = exact * self._step
            for inner, factor in self._factors:
                total.add_((exact / inner).floor_(), alpha=factor)
            index = total.long()
        if self._copies is not None:
            index = index[:, None] + self._copies
            served = served[:, None].expand_as(index)
        self._memory.put_(index, served)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of a decoder layer. H query and K key heads of D; C hidden, F intermediate; e.g. `qkv [96, 256]`.

    In a mixture `up_gate` and `down` stack all E experts: `[E, C, 2F]` and `[E, F, C]`.
    """

    attention_norm: Norm  # [C]
    qkv: Tensor  # [C, (H + 2K) * D] queries, keys, values
    qkv_bias: Tensor | None  # [(H + 2K) * D]
    qk_norm: Norm | None  # [H + K, D]
    out: Tensor  # [H * D, C]
    out_bias: Tensor | None  # [C]
    mlp_norm: Norm  # [C]
    router: Tensor | None  # [C, E], of a mixture
    up_gate: Tensor  # [C, 2F] the up projection, then the gate
    up_gate_bias: Tensor | None  # [2F]
    down: Tensor  # [F, C]
    down_bias: Tensor | None  # [C]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a model; V is the vocabulary, e.g. `head [96, 123]`."""

    embedding: Tensor  # [V, C]
    layers: tuple[LayerWeights, ...]
    norm: Norm  # [C]
    head: Tensor  # [C, V]

    def copy_(self, other: "Weights") -> None:
        """Copy the values of `other`, a model of the same spec, into these tensors."""
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            mine.copy_(theirs)

    def checksum(self, spec: ModelSpec) -> WeightsChecksum:
        """BLAKE3 of every matrix of the model, by its Hugging Face name, over type, shape and packed bytes."""
        hashes = {}
        for name, tensor in self._named(spec):
            digest = blake3(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
            hashes[name] = digest.hexdigest(length=16)
        total = blake3("\n".join(hashes.values()).encode()).hexdigest()
        return WeightsChecksum(total, hashes, quantized=spec.quantized)

    def in_file_order(self, spec: ModelSpec) -> dict[str, list[FileView]]:
        """Return views of the values by the names in the files; a tied embedding has two, and so has a norm."""
        views = {name: [_in_file_order(name, packed, spec)] for name, packed in self._named(spec)}
        for name, norm in self._norms(spec):
            views[name].append(_in_file_order(name, norm.scale, spec, scale=math.sqrt(norm.scale.shape[-1])))
        if spec.tied:
            views["model.embed_tokens.weight"] += views.pop("lm_head.weight")
        return views

    def _named(self, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
        """Yield each matrix of the model from its place in the packed weights, in a fixed order."""
        yield "model.embed_tokens.weight", self.embedding
        for norm_name, norm in self._norms(spec):
            yield norm_name, norm.weight
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            for name, place in projections(spec).items():
                columns = slice(place.start, place.start + place.size)
                yield f"{prefix}{place.block}.{name}.weight", getattr(layer, place.field)[:, columns]
                bias: Tensor | None = getattr(layer, f"{place.field}_bias", None)
                if bias is not None:
                    yield f"{prefix}{place.block}.{name}.bias", bias[columns]
            if layer.router is not None:
                yield prefix + "mlp.gate.weight", layer.router
                for expert, (up_gate, down) in enumerate(zip(layer.up_gate, layer.down, strict=True)):
                    up, gate = up_gate.chunk(2, dim=1)
                    for name, tensor in (("up_proj", up), ("gate_proj", gate), ("down_proj", down)):
                        yield f"{prefix}mlp.experts.{expert}.{name}.weight", tensor
        yield "lm_head.weight", self.head

    def _norms(self, spec: ModelSpec) -> Iterator[tuple[str, Norm]]:
        """Yield each norm of the model by its name in the files."""
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            yield prefix + "input_layernorm.weight", layer.attention_norm
            yield prefix + "post_attention_layernorm.weight", layer.mlp_norm
            if layer.qk_norm is not None:
                yield prefix + "self_attn.q_norm.weight", layer.qk_norm.rows(0, spec.num_heads)
                yield prefix + "self_attn.k_norm.weight", layer.qk_norm.rows(spec.num_heads)
        yield "model.norm.weight", self.norm

    def _tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that a load changes, in a fixed order."""
        yield from (self.embedding, self.norm.weight, self.norm.scale, self.head)
        for layer in self.layers:
            for field in fields(layer):
                value = getattr(layer, field.name)
                if isinstance(value, Norm):
                    yield from (value.weight, value.scale)
                elif value is not None:
                    yield value


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Place of one Hugging Face matrix of a layer in the packed weights. For example, `gate_proj` is:

    `Projection(block="mlp", field="up_gate", start=256, size=256, inputs=96)`.
    """

    block: str  # part of the Hugging Face name
    field: str  # of `LayerWeights`
    start: int  # its first column
    size: int  # columns, its output size
    inputs: int  # rows, its input size
    head_dim: int | None = None  # head size if the halves of heads are interleaved, else None

    def packed(self, rows: Tensor) -> Tensor:
        """Reorder rows `[size, ...]` of the Hugging Face matrix to the order of the packed columns."""
        return rows if self.head_dim is None else interleaved(rows, self.head_dim)


def projections(spec: ModelSpec) -> dict[str, Projection]:
    """Places of a layer's matrices by Hugging Face name, e.g. `k_proj`. Matrices of experts are left out."""
    dim, inner, hidden = spec.head_dim, spec.intermediate, spec.hidden
    size_q, size_kv = spec.num_heads * dim, spec.num_kv_heads * dim
    found = {
        "q_proj": Projection(block="self_attn", field="qkv", start=0, size=size_q, inputs=hidden, head_dim=dim),
        "k_proj": Projection(
            block="self_attn", field="qkv", start=size_q, size=size_kv, inputs=hidden, head_dim=dim
        ),
        "v_proj": Projection(block="self_attn", field="qkv", start=size_q + size_kv, size=size_kv, inputs=hidden),
        "o_proj": Projection(block="self_attn", field="out", start=0, size=hidden, inputs=size_q),
    }
    if spec.mixture is None:
        found["up_proj"] = Projection(block="mlp", field="up_gate", start=0, size=inner, inputs=hidden)
        found["gate_proj"] = Projection(block="mlp", field="up_gate", start=inner, size=inner, inputs=hidden)
        found["down_proj"] = Projection(block="mlp", field="down", start=0, size=hidden, inputs=inner)
    return found


def load_weights(folder: Path, *, spec: ModelSpec) -> Weights:
    """Load the weights in all `*.safetensors` of `folder`. `RefusedError` names a missing or misshapen tensor."""
    with ExitStack() as stack:
        files = _Folder(folder, stack, dtype=spec.dtype, quantized=spec.quantized)
        embedding = files.read("model.embed_tokens.weight", spec.vocab, spec.hidden)
        head = embedding if spec.tied else files.read("lm_head.weight", spec.vocab, spec.hidden)
        return Weights(
            embedding=embedding.clone(),
            layers=tuple(_read_layer(files, f"model.layers.{i}.", spec=spec) for i in range(spec.num_layers)),
            norm=Norm.from_weight(files.read("model.norm.weight", spec.hidden), eps=spec.eps),
            head=_packed(head),
        )


class _Folder:
    """The tensors of a folder's safetensors files, memory-mapped if `dtype` allows; `quantized` as by fp8."""

    def __init__(self, folder: Path, stack: ExitStack, *, dtype: torch.dtype, quantized: bool) -> None:
        self._folder, self._dtype, self._quantized = folder, dtype, quantized
        try:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in folder.glob("*.safetensors")]
        except SafetensorError as error:
            raise RefusedError(
                f"weights={folder}: not a safetensors file: {error}; write the version again"
            ) from error
        self._by_name = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a dict)

    def read(self, name: str, *shape: int) -> Tensor:
        """Read the tensor `name`. `RefusedError` if it is missing or has another shape."""
        file = self._by_name.get(name)
        if file is None:
            raise RefusedError(f"weights={self._folder}: {name} is missing; write all tensors of the model")
        tensor: Tensor = file.get_tensor(name)
        if tensor.shape != shape:
            raise RefusedError(
                f"weights={self._folder}: {name} has shape {tuple(tensor.shape)}, but the model"
                f" needs {shape}; publish weights of model.path"
            )
        if self._quantized and fp8.is_quantized(name):
            tensor = fp8.rounded(tensor)
        return tensor.to(self._dtype)


def _read_layer(files: _Folder, prefix: str, *, spec: ModelSpec) -> LayerWeights:
    """Read the weights of a layer, packed as the CPU kernels need them.

    Query, key and value share one matrix, as do up and gate. Raises `RefusedError` for a
    missing or misshapen tensor.
    """
    hidden, intermediate, head_dim, mixture = spec.hidden, spec.intermediate, spec.head_dim, spec.mixture
    size_q, size_kv = spec.num_heads * head_dim, spec.num_kv_heads * head_dim

    def read(name: str, *shape: int) -> Tensor:
        return files.read(prefix + name, *shape)

    def norm(name: str) -> Norm:
        return Norm.from_weight(read(f"{name}.weight", hidden), eps=spec.eps)

    def qkv(kind: str, *size_in: int) -> Tensor:
        q = read(f"self_attn.q_proj.{kind}", size_q, *size_in)
        k, v = (read(f"self_attn.{name}_proj.{kind}", size_kv, *size_in) for name in "kv")
        return torch.cat([interleaved(q, head_dim), interleaved(k, head_dim), v])

    def up_gate(mlp: str, kind: str, *size_in: int) -> Tensor:
        return torch.cat([read(f"{mlp}.{name}_proj.{kind}", intermediate, *size_in) for name in ("up", "gate")])

    def qk_norm() -> Norm:
        q, k = (interleaved(read(f"self_attn.{name}_norm.weight", head_dim), head_dim) for name in "qk")
        rows = [q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)]
        return Norm.from_weight(torch.cat(rows), eps=spec.eps)

    def of_experts(read_one: Callable[[str], Tensor]) -> Tensor:
        if mixture is None:
            return _packed(read_one("mlp"))
        return torch.stack([_packed(read_one(f"mlp.experts.{i}")) for i in range(mixture.num_experts)])

    return LayerWeights(
        attention_norm=norm("input_layernorm"),
        qkv=_packed(qkv("weight", hidden)),
        qkv_bias=qkv("bias") if spec.qkv_bias else None,
        qk_norm=qk_norm() if spec.qk_norm else None,
        out=_packed(read("self_attn.o_proj.weight", hidden, size_q)),
        out_bias=read("self_attn.o_proj.bias", hidden).clone() if spec.out_bias else None,
        mlp_norm=norm("post_attention_layernorm"),
        router=_packed(read("mlp.gate.weight", mixture.num_experts, hidden)) if mixture else None,
        up_gate=of_experts(lambda mlp: up_gate(mlp, "weight", hidden)),
        up_gate_bias=up_gate("mlp", "bias") if spec.mlp_bias else None,
        down=of_experts(lambda mlp: read(f"{mlp}.down_proj.weight", hidden, intermediate)),
        down_bias=read("mlp.down_proj.bias", hidden).clone() if spec.mlp_bias else None,
    )


def _packed(weight: Tensor) -> Tensor:
    """Transpose `[out, in]` to a contiguous copy `[in, out]`."""
    return weight.t().clone(memory_format=torch.contiguous_format)


def interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder rows `[heads * D, ...]`: put dimension i of a head beside i + D / 2, its partner in the rotation."""
    return rows.view(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).flatten(0, 2)


def _in_file_order(name: str, packed: Tensor, spec: ModelSpec, *, scale: float = 1.0) -> FileView:
    """View the packed tensor of a Hugging Face name, or `scale` times it, in the order of that tensor."""
    if name == "model.embed_tokens.weight":
        return FileView(packed)
    part, dim = name.split(".")[-2], spec.head_dim
    if part in ("q_norm", "k_norm"):  # the same for each head
        halves = packed[0].view(dim // 2, 2).t()
        return FileView(halves, scale=scale, copies=len(packed), step=packed.stride(0))
    if part.endswith("norm"):
        return FileView(packed, scale=scale)
    rows = packed.t()  # a bias stays [size]
    if part in ("q_proj", "k_proj"):  # undo `interleaved`
        step, *others = rows.stride()
        sizes = (len(rows) // dim, 2, dim // 2, *rows.shape[1:])
        rows = rows.as_strided(sizes, (dim * step, step, 2 * step, *others))
    return FileView(rows)
