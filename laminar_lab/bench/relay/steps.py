"""Versions as optimizer steps make them: the learner's stall in a publish, and the bytes of a delta.

The weights are a model's as AdamW leaves them: fp32 masters, published as bf16. A node in another process reports
the wire bytes once it has verified the version's digest.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

from laminar_lab.bench.relay.tree import CHUNK_BYTES, ROOT, WARM_VERSIONS, Tree, copy_s, raw
from laminar_lab.bench.report import Ratio, Row, in_turn, log_line
from laminar_lab.bench.workplace import SHARED_MEMORY, SMALL, workplace
from laminar_py.learner import named_tensors
from laminar_py.relay import RelayKeys, apply, encode

ROWS = (
    "stall_with_cast_over_memcpy stall_over_memcpy delta_bytes_1e6 delta_bytes_3e6 delta_encode_GBps "
    "delta_apply_GBps"
)
NUM_SEQUENCES, LENGTH = 10, 128  # of a step's batch
BETAS = (0.9, 0.999)
WEIGHT_DECAY = 0.01
RATES = {"1e6": 1e-6, "3e6": 3e-6}  # learning rates, by their part of a row's name
FIRST_STEP, LAST_STEP = 12, 15  # whose deltas count, each against the step before

Words = npt.NDArray[np.uint16]  # weights in bf16, as integers


def rows(*, shm: Path = SHARED_MEMORY, repeats: int = 7, config: Qwen3Config = SMALL) -> list[Row]:
    """Measure the stall and deltas; versions lie in `shm`."""
    stalls = stall_rows(shm=shm, repeats=repeats, config=config)
    return stalls + delta_rows(shm=shm, repeats=repeats, config=config)


# ---- the stall


def stall_rows(*, shm: Path, repeats: int, config: Qwen3Config) -> list[Row]:
    """Compare the stall of a publish with a plain copy of the same bytes, which lie in `shm`.

    One stall is from fp32 masters, as a learner publishes; the other is from tensors that are bf16 before.
    """
    model = _model(config)
    tensors = list(_published(model))
    pairs = [(raw(tensor), np.ones_like(raw(tensor))) for _, tensor in tensors]
    with workplace(shm) as folder, Tree(folder / "stall", keys=RelayKeys.generate(), topology=ROOT) as tree:

        def stall(published: Iterable[tuple[str, Tensor]]) -> float:
            tree.await_spare()
            stall_s = tree.publish(published)
            tree.await_last()
            return stall_s

        def copy(_: int) -> float:
            tree.await_spare()
            return copy_s(pairs)

        sides = {
            "masters": lambda _: stall(named_tensors(model, dtype=torch.bfloat16)),
            "ready": lambda _: stall(tensors),
            "copy": copy,
        }
        found = in_turn(sides, rounds=repeats, warm=WARM_VERSIONS)
    plain_s, num_bytes = median(found["copy"]), sum(tensor.nbytes for _, tensor in tensors)
    conditions = (
        "stall {0:.1f} ms, {1}; numpy.copyto of the"
        f" {num_bytes / 1e6:.0f} MB of bf16 into warm memory {1000 * plain_s:.1f} ms"
        f" ({num_bytes / 1e9 / plain_s:.1f} GB/s)"
    )
    starts = {
        "stall_with_cast_over_memcpy": ("masters", "from fp32 masters, gather and cast included"),
        "stall_over_memcpy": ("ready", "from tensors that are bf16 before"),
    }
    return [
        Ratio.between(found[side], found["copy"]).row(name, conditions.format(1000 * median(found[side]), start))
        for name, (side, start) in starts.items()
    ]


# ---- deltas


@dataclass(frozen=True, slots=True)
class DeltaShare:
    """Size of a version's delta against the one before, e.g. `DeltaShare(0.0095, 0.0123)`."""

    wire_share: float  # bytes on the wire over bytes of the version
    changed: float  # share of elements

    @property
    def bound(self) -> float:
        """Share that the positions alone need if they are independent: n H(p) bits in n elements of 16."""
        p = self.changed
        return -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / 16 if 0 < p < 1 else 0.0


def delta_rows(*, shm: Path, repeats: int, config: Qwen3Config) -> list[Row]:
    """Measure the bytes of deltas at each learning rate, and the speed of the codec at the lowest.

    All in `shm`.
    """
    found, speeds = [], []
    for name, rate in RATES.items():
        with workplace(shm) as folder:
            row, base, new = _wire(folder / name, config, name=f"delta_bytes_{name}", rate=rate)
        found.append(row)
        log_line(f"{row.name} {row.value:.4f}")
        if rate == min(RATES.values()):
            speeds = codec_rows(base, new, repeats=repeats, rate=rate)
    return found + speeds


def _wire(folder: Path, config: Qwen3Config, *, name: str, rate: float) -> tuple[Row, Words, Words]:
    """Train and publish a few steps; return the row of the bytes, and the last two versions."""
    model = _model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
    generator = torch.Generator().manual_seed(1)
    deltas: list[DeltaShare] = []
    words = base = _words(model)
    with Tree(folder, keys=RelayKeys.generate()) as tree:
        for step in range(1, LAST_STEP + 1):
            _step(model, optimizer, generator)
            if step < FIRST_STEP - 1:
                continue
            base, words = words, _words(model)
            tree.publish(_published(model))
            _, report = tree.await_last()
            if step >= FIRST_STEP:
                share = report.wire_bytes / report.num_bytes
                deltas.append(DeltaShare(share, float(np.mean(base != words))))
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
    """[num_parameters] weights as they are published."""
    words: Words = torch.cat([tensor.flatten() for _, tensor in _published(model)]).view(torch.uint16).numpy()
    return words


def _step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    """Make a REINFORCE step with random normal advantages."""
    ids = torch.randint(model.config.vocab_size, (NUM_SEQUENCES, LENGTH), generator=generator)  # [B, T]
    advantages = torch.randn(NUM_SEQUENCES, 1, generator=generator)  # [B, 1]
    logits = model(input_ids=ids).logits[:, :-1]  # [B, T - 1, V]
    losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")  # [B (T - 1)]
    loss: Tensor = (losses.view(NUM_SEQUENCES, -1) * advantages).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def codec_rows(base: Words, new: Words, *, repeats: int, rate: float) -> list[Row]:
    """Measure the codec in bytes of the full version per CPU second of one thread."""
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
    encode_s, copied_s, apply_s = (median(seconds[1:]) for seconds in (encoding, copying, applying))
    gigabytes = new.nbytes / 1e9
    conditions = (
        f"{gigabytes * 1000:.0f} MB after an AdamW step at {rate:g}, chunks of {CHUNK_BYTES / 2**20:g} MiB, GB of"
        " the full version per CPU-second of one thread; apply in place, into a copy of the base: the copy alone"
        f" {gigabytes / copied_s:.1f} GB/s, both {gigabytes / (copied_s + apply_s):.1f} GB/s; median of {repeats}"
    )
    speeds = {"delta_encode_GBps": gigabytes / encode_s, "delta_apply_GBps": gigabytes / apply_s}
    return [Row(name, speed, "GB/s", conditions) for name, speed in speeds.items()]


def _pieces(words: Words) -> list[bytes]:
    data = words.tobytes()
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
