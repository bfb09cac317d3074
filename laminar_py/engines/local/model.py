"""The hand-written forward of Qwen3, Qwen3-MoE, Qwen2 and Llama decoders, over packed weights.

The engine's thread calls it. The model knows tokens and positions; `attention` knows where keys and values are
stored and which tokens a query may see. T is the number of tokens in a call, k of E experts compute each token.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from laminar_py.engines.local.adapter import Adapter, AdapterBase
from laminar_py.engines.local.attention import DecodeAttention, DecodePlan, PrefillAttention
from laminar_py.engines.local.changes import Views, apply_changes
from laminar_py.engines.local.spec import Mixture, ModelSpec
from laminar_py.engines.local.weights import LayerWeights, Weights, load_weights
from laminar_py.records.engine import CheckedChanges
from laminar_py.records.proofs import WeightsChecksum
from laminar_py.records.weights import holds_adapter


class Routing:
    """The experts that one forward chooses for T tokens, layer after layer."""

    def __init__(self, mixture: Mixture) -> None:
        self._mixture = mixture
        self._chosen: list[Tensor] = []

    @property
    def experts(self) -> Tensor:
        """Chosen experts of all layers so far, `[T, layers, k]`."""
        return torch.stack(self._chosen, 1)

    def best(self, scores: Tensor) -> Tensor:
        """Return the experts with the highest `scores [T, E]`, `[T, k]`; tests of router replay add noise here."""
        return scores.topk(self._mixture.top_k).indices

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts of the next layer by its `logits [T, E]`. Returns experts and weights, `[T, k]`."""
        scores = logits.float()
        experts = self.best(scores)
        self._chosen.append(experts)
        chosen = scores.gather(1, experts)
        if self._mixture.renormalises:
            return experts, chosen.softmax(-1)
        return experts, (chosen - scores.logsumexp(-1, keepdim=True)).exp()


def mix_experts(x: Tensor, layer: LayerWeights, routing: Routing) -> Tensor:
    """Route `x [T, C]` and sum the weighted outputs of the chosen experts, as `[T, C]`.

    Tokens are sorted by expert, so each chosen expert's weights are read once. In fp32 with 8 of 64 experts this
    takes a fifth of a dense product's time at 8 tokens, and a nineteenth at 512 tokens. In
    bf16 the dense product is as fast at 8 to 32 tokens, and faster in the smallest models.
    """
    assert layer.router is not None, "a mixture has a router in every layer"
    num_experts, intermediate, _ = layer.down.shape
    experts, weights = routing.choose(x @ layer.router)
    experts_in_order, order = experts.flatten().sort()
    tokens = order.div(experts.shape[1], rounding_mode="floor")
    every = torch.arange(num_experts)
    ends = torch.searchsorted(experts_in_order, every, right=True, out_int32=True)
    up_gate = F.grouped_mm(x.index_select(0, tokens), layer.up_gate, offs=ends)
    inner = F.glu(up_gate) * up_gate[:, intermediate:]  # as in `LocalModel`
    out = F.grouped_mm(inner, layer.down, offs=ends)
    shares = out * weights.flatten().index_select(0, order)[:, None].to(x.dtype)
    return torch.zeros_like(x).index_add(0, tokens, shares)


class LocalModel:
    """Weights and forward of one model. Call `load` before the first forward."""

    def __init__(self, spec: ModelSpec, *, max_len: int) -> None:
        self._spec = spec
        self._weights: Weights | None = None
        self._views: Views = {}  # of the weights in the order of the files
        self._base: AdapterBase | None = None  # base of the served adapter; None with whole weights
        self._steps: dict[bool, Callable[..., tuple[Tensor, ...]]] = {}  # traced, with drafts and without
        frequencies = spec.rope_theta ** -(torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)[:, None]
        self._rotations = torch.polar(torch.ones_like(angles), angles)  # [max_len, 1, D / 2]

    def load(self, folder: Path) -> None:
        """Load the weights in `folder`, or merge its adapters into their base.

        Raises `RefusedError` for bad files; the old weights then stay.
        """
        if holds_adapter(folder):
            self._merge(Adapter.read(folder, spec=self._spec))
        else:
            self._serve(load_weights(folder, spec=self._spec))
            self._base = None

    @property
    def takes_changes(self) -> bool:
        """True if it serves the values of a version's files, neither rounded to fp8 nor with an adapter merged."""
        return self._weights is not None and self._base is None and not self._spec.quantized

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each tensor in the files, of a model that takes changes."""
        return {name: views[0].numel for name, views in self._views.items()}

    def change(self, changes: CheckedChanges) -> None:
        """Put checked changes of the served weights into them."""
        apply_changes(changes.files, self._views, dtype=self._spec.dtype)

    def _merge(self, adapter: Adapter) -> None:
        """Serve `adapter` merged into its base. Reads the base from disk if the last base does not fit."""
        if self._base is not None and self._base.fits(adapter.config):
            self._base.merge(adapter, self._loaded())
            return
        base = AdapterBase(adapter.config, spec=self._spec)
        weights = base.weights()
        base.merge(adapter, weights)
        self._serve(weights)
        self._base = base

    def _serve(self, weights: Weights) -> None:
        """Use `weights` from the next forward on."""
        if self._weights is None:
            self._weights, self._views = weights, weights.in_file_order(self._spec)
        else:
            self._weights.copy_(weights)  # in place: the traced step holds these tensors

    def checksum(self) -> WeightsChecksum:
        """Hashes of the served weights; "unloaded" before the first load."""
        return WeightsChecksum("unloaded") if self._weights is None else self._weights.checksum(self._spec)

    def decode(self, ids: Tensor, positions: Tensor, *, plan: DecodePlan) -> tuple[Tensor, Tensor | None]:
        """Feed T tokens of B sequences: `ids [T]` at `positions [T]`.

        Returns the logits `[T, V]` in fp32, and in a mixture the chosen experts `[T, layers, k]`, else None.
        """
        step = self._steps.get(plan.has_drafts)
        if step is None:
            has_drafts = plan.has_drafts
            step = _traced(lambda *inputs: self._decode(*inputs, has_drafts=has_drafts), (ids, positions, *plan))
            self._steps[has_drafts] = step
        logits, *experts = step(ids, positions, *plan)
        return logits, experts[0] if experts else None

    def _decode(self, ids: Tensor, positions: Tensor, *plan: Tensor, has_drafts: bool) -> tuple[Tensor, ...]:
        """Compute logits, then experts in a mixture. Arguments give all sizes, so one trace fits all batches."""
        weights = self._loaded()
        attention = DecodeAttention(DecodePlan(*plan), self._spec, has_drafts=has_drafts)
        hidden = F.embedding(ids, weights.embedding)
        rotations, routing = self._rotations.index_select(0, positions), self._routing()
        for index, layer in enumerate(weights.layers):
            q, k, v = self._project(layer, hidden, rotations)
            attention.store(index, k, v)
            hidden = self._finish(layer, hidden, attention.mix(index, q), routing)
        logits = (weights.norm(hidden) @ weights.head).float()
        return (logits,) if routing is None else (logits, routing.experts)

    def prefill(self, ids: Tensor, positions: Tensor, *, attention: PrefillAttention) -> None:
        """Write the keys and values of `ids [T]` at `positions [T]` into the cache. Computes no logits."""
        weights = self._loaded()
        hidden = F.embedding(ids, weights.embedding)
        rotations, routing = self._rotations.index_select(0, positions), self._routing()
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            q, k, v = self._project(layer, hidden, rotations)
            attention.store(index, k, v)
            if index < last or attention.records_experts:
                hidden = self._finish(layer, hidden, attention.mix(index, q), routing)
        if routing is not None and attention.records_experts:
            attention.record(routing.experts)

    def _loaded(self) -> Weights:
        assert self._weights is not None, "load_weights comes before the first step"
        return self._weights

    def _routing(self) -> Routing | None:
        """New `Routing` for one forward; None if the model has no experts."""
        return None if self._spec.mixture is None else Routing(self._spec.mixture)

    def _project(self, layer: LayerWeights, hidden: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute rotated queries `[T, H, D]`, rotated keys `[T, K, D]` and values `[T, K, D]` of one layer."""
        spec = self._spec
        num_rotated = spec.num_heads + spec.num_kv_heads
        qkv = _linear(layer.attention_norm(hidden), layer.qkv, layer.qkv_bias)
        heads = qkv.view(-1, num_rotated + spec.num_kv_heads, spec.head_dim)
        qk = heads[:, :num_rotated]
        if layer.qk_norm is not None:
            qk = layer.qk_norm(qk)
        pairs = torch.view_as_complex(qk.float().view(-1, num_rotated, spec.head_dim // 2, 2))
        qk = torch.view_as_real(pairs * rotations).flatten(-2).to(hidden.dtype)
        return qk[:, : spec.num_heads], qk[:, spec.num_heads :], heads[:, num_rotated:]

    def _finish(self, layer: LayerWeights, hidden: Tensor, mixed: Tensor, routing: Routing | None) -> Tensor:
        """Compute the rest of a layer after attention: output projection, then MLP or experts, with residuals."""
        hidden = hidden + _linear(mixed, layer.out, layer.out_bias)
        if routing is not None:
            return hidden + mix_experts(layer.mlp_norm(hidden), layer, routing)
        up_gate = _linear(layer.mlp_norm(hidden), layer.up_gate, layer.up_gate_bias)
        # silu(gate) * up = up * sigmoid(gate) * gate, and glu is the first product in one pass
        inner = F.glu(up_gate) * up_gate[:, self._spec.intermediate :]
        return hidden + _linear(inner, layer.down, layer.down_bias)


def _traced(
    step: Callable[..., tuple[Tensor, ...]], arguments: tuple[Tensor, ...]
) -> Callable[..., tuple[Tensor, ...]]:
    """Trace `step` on example `arguments`, so that no Python runs between its 150 operations.

    A traced step takes half the time at batch 1 and five sixths at batch 64. `torch.compile`, the successor of the
    deprecated `torch.jit`, needs a compiler and 6 to 31 s for each shape.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced: Callable[..., tuple[Tensor, ...]] = torch.jit.trace(step, arguments, check_trace=False)  # type: ignore[no-untyped-call]
    return traced


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x @ weight
    return y if bias is None else y.add_(bias)
