"""What a publish costs the learner, and how little of a version travels after a real optimizer step.

Rows `stall_over_memcpy` and `delta_*` of `laminar bench relay`. The weights are a model's as AdamW leaves them:
fp32 masters, published as bf16. Invariant: wire bytes are those that a node in another process reports once it has
verified the version's digest.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

from laminar_py.bench.relay_node import CHUNK_BYTES
from laminar_py.bench.relay_tree import WARM_VERSIONS, Tree
from laminar_py.bench.report import Row
from laminar_py.relay.store.delta import apply, encode
from laminar_py.relay.wire.transport import RelayKeys

MODEL = Qwen3Config(
    vocab_size=8192,
    hidden_size=512,
    num_hidden_layers=7,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1440,
    tie_word_embeddings=True,
)
NUM_SEQUENCES, LENGTH = 10, 128  # of a step's batch
BETAS = (0.9, 0.999)
WEIGHT_DECAY = 0.01
RATES = {"1e6": 1e-6, "3e6": 3e-6}  # learning rates, by their part of a row's name
FIRST_STEP, LAST_STEP = 12, 15  # whose deltas count, each against the step before

Words = npt.NDArray[np.uint16]


def rows(folder: Path, *, repeats: int, tell: Callable[[str], None], model: Qwen3Config = MODEL) -> list[Row]:
    """The stall, the bytes of deltas and the speed of their codec; `folder` is in shared memory."""
    found = [_stall(folder / "stall", model, repeats=repeats)]
    tell(f"{found[0].name} {found[0].value:.2f}")
    for name, rate in RATES.items():
        row, base, new = _wire(folder / name, model, name=f"delta_bytes_{name}", rate=rate)
        found.append(row)
        tell(f"{row.name} {row.value:.4f}")
        if rate == min(RATES.values()):
            found += _codec(base, new, repeats=repeats, rate=rate)
    return found


# ---- the stall


def _stall(folder: Path, config: Qwen3Config, *, repeats: int) -> Row:
    tensors = list(_published(_model(config)))
    num_bytes = sum(tensor.nbytes for _, tensor in tensors)
    copies = [(tensor.view(torch.uint8).numpy(), np.ones(_bytes_shape(tensor), np.uint8)) for _, tensor in tensors]
    stalls, plain = [], []
    with Tree(folder, keys=RelayKeys.generate(), leaf=False) as tree:
        for turn in range(WARM_VERSIONS + repeats):
            tree.await_spare()
            if turn % 2:
                plain.append(_copy(copies))
            stalls.append(tree.publish(tensors))
            tree.await_last()
            if turn % 2 == 0:
                plain.append(_copy(copies))
    stalls, plain = stalls[WARM_VERSIONS:], plain[WARM_VERSIONS:]
    ratios = [stall / copy for stall, copy in zip(stalls, plain, strict=True)]
    conditions = (
        f"{num_bytes / 1e6:.0f} MB of bf16 in {len(tensors)} tensors; stall {1000 * median(stalls):.1f} ms,"
        f" numpy.copyto of the same tensors into warm memory {1000 * median(plain):.1f} ms"
        f" ({num_bytes / 1e9 / median(plain):.1f} GB/s); median of {repeats} rounds in turn,"
        f" {min(ratios):.2f} to {max(ratios):.2f}"
    )
    return Row("stall_over_memcpy", median(ratios), "x", conditions)


def _bytes_shape(tensor: Tensor) -> tuple[int, ...]:
    return (*tensor.shape[:-1], tensor.shape[-1] * tensor.itemsize)


def _copy(pairs: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]) -> float:
    began = time.perf_counter()
    for source, target in pairs:
        np.copyto(target, source)
    return time.perf_counter() - began


# ---- deltas


@dataclass(frozen=True, slots=True)
class Delta:
    """One version against the one before, e.g. `Delta(0.0095, 0.0123)`."""

    wire_share: float  # bytes that travelled over those of the version
    changed: float  # share of elements

    @property
    def bound(self) -> float:
        """Share that the positions alone need if they are independent: n H(p) bits in n elements of 16."""
        p = self.changed
        return -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / 16 if 0 < p < 1 else 0.0


def _wire(folder: Path, config: Qwen3Config, *, name: str, rate: float) -> tuple[Row, Words, Words]:
    """The row, and the last two versions."""
    model = _model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
    generator = torch.Generator().manual_seed(1)
    deltas: list[Delta] = []
    words = base = _words(model)
    with Tree(folder, keys=RelayKeys.generate(), leaf=True) as tree:
        for step in range(1, LAST_STEP + 1):
            _step(model, optimizer, generator)
            if step < FIRST_STEP - 1:
                continue
            base, words = words, _words(model)
            tree.publish(_published(model))
            _, report = tree.await_last()
            if step >= FIRST_STEP:
                deltas.append(Delta(report.wire_bytes / report.num_bytes, float(np.mean(base != words))))
    worst = max(deltas, key=lambda delta: delta.wire_share)
    shares = ", ".join(f"{delta.wire_share:.4f}" for delta in deltas)
    conditions = (
        f"{model.num_parameters() / 1e6:.1f} M parameters in bf16 with fp32 masters, AdamW at {rate:g} with betas"
        f" {BETAS} and weight decay {WEIGHT_DECAY}, policy-gradient loss on {NUM_SEQUENCES} x {LENGTH} new tokens"
        f" a step; worst of steps {FIRST_STEP} to {LAST_STEP} ({shares}), in it {worst.changed:.2%} of elements"
        f" changed: entropy bound of their positions n H(p) = {worst.bound:.4f}; from a root to a child"
    )
    return Row(name, worst.wire_share, "of full bytes", conditions), base, words


def _model(config: Qwen3Config) -> Qwen3ForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config).float()


def _published(model: Qwen3ForCausalLM) -> Iterable[tuple[str, Tensor]]:
    return ((name, parameter.detach().bfloat16()) for name, parameter in model.named_parameters())


def _words(model: Qwen3ForCausalLM) -> Words:
    """[num_parameters] what is published, as integers."""
    words: Words = torch.cat([tensor.flatten() for _, tensor in _published(model)]).view(torch.uint16).numpy()
    return words


def _step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    """REINFORCE with random advantages, normal as those of a group."""
    ids = torch.randint(model.config.vocab_size, (NUM_SEQUENCES, LENGTH), generator=generator)  # [B, T]
    advantages = torch.randn(NUM_SEQUENCES, 1, generator=generator)  # [B, 1]
    logits = model(input_ids=ids).logits[:, :-1]  # [B, T - 1, V]
    losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")  # [B (T - 1)]
    loss: Tensor = (losses.view(NUM_SEQUENCES, -1) * advantages).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _codec(base: Words, new: Words, *, repeats: int, rate: float) -> list[Row]:
    """Speed over full-model bytes on one thread, in its CPU time: one core's."""
    olds, news = _pieces(base), _pieces(new)
    encoding, copying, applying = [], [], []
    for _ in range(repeats + 1):  # the first warms up
        began = time.thread_time()
        payloads = [encode(piece, old, width=2) for piece, old in zip(news, olds, strict=True)]
        encoded = time.thread_time()
        copies = [memoryview(bytearray(old)) for old in olds]
        copied = time.thread_time()
        for payload, data in zip(payloads, copies, strict=True):
            assert payload is not None, f"too much changed at {rate:g} for a delta"
            apply(payload, data, data)
        encoding.append(encoded - began)
        copying.append(copied - encoded)
        applying.append(time.thread_time() - copied)
        assert copies == news, "a delta did not make the version that it was made of"
    encode_s, copy_s, apply_s = (median(seconds[1:]) for seconds in (encoding, copying, applying))
    gigabytes = new.nbytes / 1e9
    conditions = (
        f"{gigabytes * 1000:.0f} MB after an AdamW step at {rate:g}, chunks of {CHUNK_BYTES / 2**20:g} MiB, GB of"
        " the full version per CPU-second of one thread; apply in place, into a copy of the base: the copy alone"
        f" {gigabytes / copy_s:.1f} GB/s, both {gigabytes / (copy_s + apply_s):.1f} GB/s; median of {repeats}"
    )
    speeds = {"delta_encode_GBps": gigabytes / encode_s, "delta_apply_GBps": gigabytes / apply_s}
    return [Row(name, speed, "GB/s", conditions) for name, speed in speeds.items()]


def _pieces(words: Words) -> list[bytes]:
    data = words.tobytes()
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
