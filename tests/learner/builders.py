"""Builders of tiny models, sequences and microbatches for the learner's tests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import LearnerConfig
from laminar_py.learner.metrics import TokenSums
from laminar_py.learner.step import Learner, Update
from laminar_py.records.trajectory import MicroBatch
from laminar_py.records.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS

torch.set_num_threads(1)

VOCAB = 61
LENGTHS = (5, 17, 3, 40, 9, 2)
SETTINGS = LearnerConfig(lr=1e-2)


@dataclass(frozen=True)
class Sample:
    """One trajectory: token ids, the prompt's length, behaviour log-probabilities of the response, advantage.

    A mixture's may have the experts that its sampler chose.
    """

    ids: np.ndarray  # [P + L]
    num_prompt: int
    logprobs: np.ndarray  # [L]
    advantage: float
    experts: np.ndarray | None = None  # [P + L, layers, k] -1 at the last token

    @property
    def num_response(self) -> int:
        return len(self.ids) - self.num_prompt


def make_model_folder(
    folder: Path, *, tied: bool = False, seed: int = 0, vocab: int = VOCAB, kv_heads: int = 2
) -> Path:
    """A saved two-layer Qwen3 with grouped heads."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=tied,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def make_llama_folder(folder: Path, *, seed: int = 0, kv_heads: int = 2) -> Path:
    """A saved two-layer Llama with grouped heads."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        intermediate_size=64,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def make_mixture_folder(folder: Path, *, seed: int = 0, num_experts: int = 8, kv_heads: int = 2) -> Path:
    """A saved two-layer Qwen3-MoE: eight experts, two to a token."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=16,
        num_experts=num_experts,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def make_sequences(lengths: tuple[int, ...] = LENGTHS, *, seed: int = 0) -> list[Sample]:
    """Random sequences of these lengths, behaviour log-probabilities near those of a random model."""
    generator = np.random.default_rng(seed)
    sequences = []
    for length in lengths:
        num_prompt = 1 + length // 5
        ids = generator.integers(0, VOCAB, length)
        logprobs = generator.normal(-4.0, 0.3, length - num_prompt)
        sequences.append(Sample(ids, num_prompt, logprobs, float(generator.normal())))
    return sequences


def with_experts(sequences: list[Sample], *, seed: int = 0) -> list[Sample]:
    """As a sampler that chose at random recorded them, of `make_mixture_folder`."""
    generator = np.random.default_rng(seed)
    out = []
    for sample in sequences:
        experts = generator.random((len(sample.ids), 2, 8)).argsort(-1)[..., :2]
        experts[-1] = -1
        out.append(replace(sample, experts=experts))
    return out


def pack(sequences: list[Sample], *, num_total: int) -> MicroBatch:
    """Packed row; the weight of each sequence is 1 / num_total, spread over its response."""
    lengths = [len(s.ids) for s in sequences]
    weights = [_at_response(s, np.full(s.num_response, 1 / s.num_response / num_total)) for s in sequences]
    experts = [s.experts for s in sequences if s.experts is not None]
    return MicroBatch(
        input_ids=_join([s.ids for s in sequences], np.int32),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32),
        position_ids=_join([np.arange(length) for length in lengths], np.int32),
        labels=_join([np.append(s.ids[1:], 0) for s in sequences], np.int32),
        loss_weights=_join(weights, np.float32),
        behaviour_logprobs=_join([_at_response(s, s.logprobs) for s in sequences], np.float32),
        advantages=_join([np.full(len(s.ids), s.advantage) for s in sequences], np.float32),
        staleness=np.zeros(sum(lengths), np.int32),
        responses=np.arange(len(lengths), dtype=np.int32),
        rewards=np.zeros(len(lengths), np.float32),
        groups=np.zeros(len(lengths), np.int32),
        experts=_join(experts, np.int16) if experts else None,
    )


def make_learner(folder: Path, **kwargs) -> Learner:
    algorithm = kwargs.pop("algorithm", AlgorithmConfig())
    settings = kwargs.pop("settings", SETTINGS)
    temperature = kwargs.pop("temperature", 1.0)
    return Learner(ModelConfig(path=folder), settings, algorithm, temperature=temperature, seed=0, **kwargs)


def referred(learner: Learner, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
    """As `Learner.step` has them."""
    return batches if learner._reference is None else learner._reference.add_logprobs(batches)


def backward(learner: Learner, batches: Sequence[MicroBatch], partition: torch.Tensor | None = None) -> float:
    """The loss of microbatches whose weights sum to 1; the model has the gradient."""
    update = Update(batches=batches, share=1.0, at_start=None)
    sums = TokenSums(learner.model.device)
    return float(learner._backward(update, sums, partition, at_step_start=True))


def full_parameters(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.named_tensors(dtype=torch.float32)}


def record_gradients(learner: Learner) -> list[dict[str, torch.Tensor]]:
    """Gradients of each update from now on, in full, as its optimizer has them: clipped, reduced over ranks."""
    updates: list[dict[str, torch.Tensor]] = []

    def keep(*_: object) -> None:
        trained = ((name, item) for name, item in learner.model.named_parameters() if item.requires_grad)
        updates.append({name: _full(item.grad) for name, item in trained})

    learner._optimizer.adamw.register_step_pre_hook(keep)
    return updates


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, rel: float) -> None:
    """Each tensor by its norm."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= rel * tensor.norm() + 1e-9, name


def write_adapters(learner: Learner, folder: Path) -> Path:
    """What a learner of adapters publishes, without a relay."""
    config = learner.adapter_config()
    assert config is not None
    folder.mkdir()
    (folder / ADAPTER_CONFIG).write_bytes(config)
    save_file(full_parameters(learner), folder / ADAPTER_WEIGHTS)
    return folder


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _at_response(sample: Sample, values: np.ndarray) -> np.ndarray:
    placed = np.zeros(len(sample.ids))
    placed[sample.num_prompt - 1 : -1] = values
    return placed


def _join(rows: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(rows).astype(dtype)
