"""What adapters save on the way to an engine: the bytes of a version, and the time of a refresh.

Rows `lora_bytes_over_full` and `lora_refresh_over_full` of `laminar bench learner`. Two learners of one model, one
with adapters, make the same steps; each has a tree of two relays in processes of their own, and an engine that
loads what came to the last of them. A refresh lasts from the publishing call until the engine serves the version.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import PretrainedConfig

from laminar_py.bench.learner_parts import MAX_TOKENS, draw_lengths, make_trajectory, pack_here
from laminar_py.bench.models import write_model
from laminar_py.bench.relay_tree import WARM_VERSIONS, Tree
from laminar_py.bench.report import Row
from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.learner import LearnerConfig
from laminar_py.config.lora import LoraConfig
from laminar_py.config.model import ModelConfig
from laminar_py.engines.local.engine import LocalEngine
from laminar_py.learner.step import Learner
from laminar_py.records.batch import MicroBatch
from laminar_py.relay.wire.transport import RelayKeys

RATE = 1e-5
SEQUENCES, MEDIAN = 8, 48  # of a step


@dataclass(frozen=True, slots=True)
class _Refresh:
    """One version on its way, e.g. `_Refresh(0.21, 101_000_000, 101_000_000)`."""

    elapsed_s: float
    num_bytes: int  # of the version
    wire_bytes: int  # that went to the second relay


class _Side:
    """A learner, its relays, and the engine of a replica at the last of them."""

    def __init__(
        self, folder: Path, model: Path, lora: LoraConfig | None, *, runner: asyncio.Runner, stack: ExitStack
    ) -> None:
        settings = LearnerConfig(lr=RATE, lora=lora)
        self._learner = Learner(ModelConfig(path=model), settings, AlgorithmConfig(), temperature=1.0, seed=0)
        adapter = self._learner.adapter_config()
        self._tree = stack.enter_context(
            Tree(folder, keys=RelayKeys.generate(), leaf=True, adapter_config=adapter)
        )
        self._engine = LocalEngine(model, max_batch=4, max_len=256, kv_capacity=1024)
        self._runner = runner
        runner.run(self._engine.start())
        stack.callback(lambda: runner.run(self._engine.close()))

    def step(self, batches: Sequence[MicroBatch]) -> None:
        """Other weights, as an optimizer leaves them."""
        self._learner.step(batches)

    def refresh(self) -> _Refresh:
        """Publish, wait until the last relay has verified it, load."""
        self._tree.await_spare()
        began = time.monotonic()
        self._tree.publish(self._learner.named_tensors(dtype=torch.float32))
        _, report = self._tree.await_last()
        self._runner.run(self._engine.load_weights(self._tree.last_folder, report.version))
        return _Refresh(time.monotonic() - began, report.num_bytes, report.wire_bytes)


def lora_rows(folder: Path, *, shm: Path, config: PretrainedConfig, repeats: int) -> list[Row]:
    """Both; the model is written to `folder`, versions to `shm`."""
    model, lora = write_model(folder / "lora", config), LoraConfig()
    items = [make_trajectory(i, length) for i, length in enumerate(draw_lengths(SEQUENCES, median=MEDIAN, seed=2))]
    batches = pack_here(items, max_tokens=MAX_TOKENS)
    turns: list[tuple[_Refresh, _Refresh]] = []
    with asyncio.Runner() as runner, ExitStack() as stack:
        full = _Side(shm / "full", model, None, runner=runner, stack=stack)
        adapted = _Side(shm / "adapters", model, lora, runner=runner, stack=stack)
        for turn in range(WARM_VERSIONS + repeats):
            full.step(batches)
            adapted.step(batches)
            if turn % 2:
                one = full.refresh()
                turns.append((adapted.refresh(), one))
            else:
                turns.append((adapted.refresh(), full.refresh()))
    turns = turns[WARM_VERSIONS:]
    small, large = turns[0]
    ratios = [one.elapsed_s / other.elapsed_s for one, other in turns]
    setting = (
        f"{sum(p.stat().st_size for p in model.glob('*.safetensors')) / 4e6:.1f}M parameters in fp32, adapters of"
        f" rank {lora.rank} on {len(lora.targets)} projections of each layer: {small.num_bytes / 1e6:.2f} MB over"
        f" {large.num_bytes / 1e6:.1f} MB; publisher, root, second relay, embedded engine on one host, AdamW at"
        f" {RATE:g} between versions"
    )
    timed = (
        f"{setting}; from the publishing call until the engine serves it:"
        f" {1000 * median(one.elapsed_s for one, _ in turns):.0f} ms over"
        f" {1000 * median(other.elapsed_s for _, other in turns):.0f} ms; {small.wire_bytes / 1e6:.2f} and"
        f" {large.wire_bytes / 1e6:.1f} MB over the wire; median of {repeats} turns, {min(ratios):.3f} to"
        f" {max(ratios):.3f}"
    )
    return [
        Row("lora_bytes_over_full", small.num_bytes / large.num_bytes, "of the bytes", setting),
        Row("lora_refresh_over_full", median(ratios), "of the time", timed),
    ]
