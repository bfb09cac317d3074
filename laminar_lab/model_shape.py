"""Parameters of a decoder by part, from its `config.json`, without torch. Called by the formulas of memory and of
times.

For the Llama, Qwen2, Qwen3, Mixtral, GLM-4.5 and DeepSeek-V3 families, with mixtures, the counts equal the
model that transformers builds (`tests/doctor/test_memory.py`). For other families with the
same projections they are near.
"""

from pathlib import Path

import msgspec

from laminar_py.config.learner import LoraConfig, LoraTarget

BF16_BYTES = 2


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that decide how much memory a model takes, under the names of `config.json`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int = 0
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    model_type: str = ""
    tie_word_embeddings: bool = False
    num_experts: int | None = None
    num_local_experts: int | None = None
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    n_shared_experts: int | None = None
    first_k_dense_replace: int = 0  # layers of a mixture that are dense, the first of them
    kv_lora_rank: int | None = None  # of latent attention, as the next four
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    use_qk_norm: bool = False
    attention_bias: bool = False
    dtype: str | None = None  # of the weights; a known model without a folder is bf16
    torch_dtype: str | None = None  # the older name of `dtype`

    @property
    def served_bytes(self) -> float:
        """Bytes of one number, in weights and KV cache, as engines serve the model."""
        return 4.0 if (self.dtype or self.torch_dtype) == "float32" else float(BF16_BYTES)

    @property
    def query_width(self) -> int:
        """Width of a token's queries, summed over the heads."""
        return self.num_attention_heads * self._head

    @property
    def key_width(self) -> int:
        """Width of a token's keys, summed over their heads; values are as wide."""
        return self.num_key_heads * self._head

    @property
    def num_key_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def divisions(self) -> list[int]:
        """Tensor-parallel degrees: the query heads divide evenly, and key heads divide or are copied evenly."""
        keys = self.num_key_heads
        return [
            gpus
            for gpus in range(1, self.num_attention_heads + 1)
            if not self.num_attention_heads % gpus and (not keys % gpus or not gpus % keys)
        ]

    @property
    def _head(self) -> int:
        if self.kv_lora_rank:
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def experts(self) -> int:
        """Experts of a layer; 0 for a dense model."""
        return self.num_experts or self.num_local_experts or self.n_routed_experts or 0

    @property
    def normalises_heads(self) -> bool:
        """True if queries and keys go through a norm of their own."""
        return self.use_qk_norm or self.model_type.startswith("qwen3")

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding; the output embedding has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def root(self) -> int:
        """Parameters outside the layers: embeddings and the last norm."""
        return self.embedding * (1 if self.tie_word_embeddings else 2) + self.hidden_size

    @property
    def layer(self) -> int:
        """Parameters of a layer; in a mixture of experts, of a layer that has experts."""
        return self._attention + self._mlp + 2 * self.hidden_size

    @property
    def _attention(self) -> int:
        """Parameters in an attention layer: projections, biases and norms of the heads."""
        hidden, queries, keys = self.hidden_size, self.query_width, self.key_width
        if self.kv_lora_rank:
            return self._latent_attention(self.kv_lora_rank)
        attention = 2 * hidden * (queries + keys)
        if self.attention_bias or self.model_type in ("qwen2", "qwen2_moe"):
            attention += queries + 2 * keys  # biases
        if self.attention_bias and not self.model_type.startswith("glm4"):
            attention += hidden  # and of the result
        if self.normalises_heads:
            attention += 2 * self._head
        return attention

    def _latent_attention(self, rank: int) -> int:
        """Parameters in a layer of latent attention, whose keys and values come out of `rank` numbers a token."""
        hidden, heads, queries = self.hidden_size, self.num_attention_heads, self.query_width
        low = self.q_lora_rank
        asking = hidden * queries if low is None else low * (hidden + 1 + queries)  # 1: a norm
        answering = hidden * (rank + self.qk_rope_head_dim) + rank
        return (
            asking
            + answering
            + heads * (rank * (self.qk_nope_head_dim + self.v_head_dim) + self.v_head_dim * hidden)
        )

    @property
    def _mlp(self) -> int:
        hidden, experts, gated = self.hidden_size, self.experts, self.shared_expert_intermediate_size
        if not experts:
            return self._dense_mlp
        gates = hidden * experts + (hidden if gated else 0)
        return gates + 3 * hidden * (experts * self._expert_width + self.shared_width)

    @property
    def _dense_mlp(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def _num_dense(self) -> int:
        return min(self.first_k_dense_replace, self.num_hidden_layers) if self.experts else 0

    @property
    def shared_width(self) -> int:
        """Width of the experts that every token goes through."""
        return (self.shared_expert_intermediate_size or 0) + (self.n_shared_experts or 0) * self._expert_width

    @property
    def _expert_width(self) -> int:
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def used_width(self) -> int:
        """Inner width of the feed-forward part that one token uses; in a mixture, of its experts together."""
        if not self.experts:
            return self.intermediate_size
        chosen = (self.num_experts_per_tok or 1) * self._expert_width
        return chosen + self.shared_width

    @property
    def total(self) -> int:
        """Parameters of the whole model."""
        return self.root + self.num_hidden_layers * self.layer - self._num_dense * (self._mlp - self._dense_mlp)

    @property
    def active(self) -> int:
        """Parameters that multiply a token: only the chosen experts count, and the input embedding does not."""
        width = self.experts * self._expert_width + self.shared_width
        idle = 3 * self.hidden_size * (width - self.used_width) if self.experts else 0
        return self.embedding + self.total - self.root - (self.num_hidden_layers - self._num_dense) * idle

    def adapters(self, lora: LoraConfig) -> int:
        """Parameters of low-rank adapters on this model."""
        hidden, queries, keys, inner = self.hidden_size, self.query_width, self.key_width, self.intermediate_size
        ends = {
            LoraTarget.Q_PROJ: hidden + queries,
            LoraTarget.K_PROJ: hidden + keys,
            LoraTarget.V_PROJ: hidden + keys,
            LoraTarget.O_PROJ: queries + hidden,
            LoraTarget.GATE_PROJ: hidden + inner,
            LoraTarget.UP_PROJ: hidden + inner,
            LoraTarget.DOWN_PROJ: inner + hidden,
        }
        return lora.rank * self.num_hidden_layers * sum(ends[target] for target in lora.targets)


def read_shape(model: Path) -> ModelShape | None:
    """Read the shape of the model in a folder; return None without a complete `config.json`.

    A `config.json` without a dtype means float32, as `laminar_py.engines.served_dtype` has it.
    """
    try:
        shape = msgspec.json.decode((model / "config.json").read_bytes(), type=ModelShape)
    except (OSError, msgspec.DecodeError):
        return None
    return shape if shape.dtype or shape.torch_dtype else msgspec.structs.replace(shape, dtype="float32")


def kv_token_bytes(shape: ModelShape, tensor_parallel: int, *, width: float | None = None) -> float:
    """Return the bytes of a token's keys and values on a GPU of a replica.

    A number has `width` bytes, by default as many as engines serve. Of latent attention each GPU keeps all
    numbers.
    """
    width = width or shape.served_bytes
    if shape.kv_lora_rank:
        return width * shape.num_hidden_layers * (shape.kv_lora_rank + shape.qk_rope_head_dim)
    heads = max(1.0, shape.num_key_heads / tensor_parallel)
    return 2.0 * width * shape.num_hidden_layers * heads * shape.key_width / shape.num_key_heads
