"""Savings by adapters on the way to an engine: the bytes of a version, and the time of a refresh.

Two learners of one model, one of them with adapters, make the same steps. Each has a tree of two relays in
processes of their own, and an engine that loads from the second relay. A refresh lasts from the publishing call
until the engine serves the version.
"""

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch
from transformers import PretrainedConfig

from laminar_lab.bench.learner.parts import RATE, draw_lengths, make_learner, make_trajectories, pack_here
from laminar_lab.bench.relay.tree import WARM_VERSIONS, Tree
from laminar_lab.bench.report import Ratio, Row, in_turn
from laminar_lab.bench.workplace import SHARED_MEMORY, SMALL, count_parameters, workplace, write_model
from laminar_py.config.learner import LoraConfig
from laminar_py.engines.local import LocalEngine
from laminar_py.relay import RelayKeys, VersionComplete

ROWS = "lora_bytes_over_full lora_refresh_over_full"
SEQUENCES, MEDIAN = 8, 48  # of a step


class Refresher:
    """A learner, its relays, and the engine of a replica at the last of them."""

    def __init__(
        self, folder: Path, model: Path, lora: LoraConfig | None, *, runner: asyncio.Runner, stack: ExitStack
    ) -> None:
        self.last: VersionComplete | None = None  # report on the newest version
        self._learner = make_learner(model, lora=lora)
        lengths = draw_lengths(SEQUENCES, median=MEDIAN, seed=2)
        self._batches = pack_here(make_trajectories(lengths, vocab=self._learner.model.config.vocab_size))
        adapter = self._learner.adapter_config()
        self._tree = stack.enter_context(Tree(folder, keys=RelayKeys.generate(), adapter_config=adapter))
        self._leaf = self._tree.nodes[1].store
        self._engine = LocalEngine(model, max_batch=4, max_len=256, kv_capacity=1024)
        self._runner = runner
        runner.run(self._engine.start())
        stack.callback(lambda: runner.run(self._engine.close()))

    def refresh(self, _: int) -> float:
        """Make a step; return the seconds to publish it, to verify it at the last relay, and to load it."""
        self._learner.step(self._batches)
        self._tree.await_spare()
        began = time.monotonic()
        self._tree.publish(self._learner.named_tensors(dtype=torch.float32))
        self.last = self._tree.await_last()[1]
        self._runner.run(self._engine.load_weights(self._leaf / self._tree.version_name, self.last.version))
        return time.monotonic() - began


def rows(*, config: PretrainedConfig = SMALL, repeats: int = 9) -> list[Row]:
    """Compare bytes and time; versions lie in shared memory."""
    lora = LoraConfig()
    with workplace() as folder, workplace(SHARED_MEMORY) as shm, asyncio.Runner() as runner, ExitStack() as stack:
        model = write_model(folder, config)
        adapted = Refresher(shm / "adapters", model, lora, runner=runner, stack=stack)
        full = Refresher(shm / "full", model, None, runner=runner, stack=stack)
        sides = {"adapted": adapted.refresh, "full": full.refresh}
        seconds = in_turn(sides, rounds=repeats, warm=WARM_VERSIONS)
        small, large = adapted.last, full.last
    assert small is not None, "no adapters were published"
    assert large is not None, "no weights were published"
    ratio = Ratio.between(seconds["adapted"], seconds["full"])
    setting = (
        f"{count_parameters(config) / 1e6:.1f}M parameters in fp32, adapters of rank {lora.rank} on"
        f" {len(lora.targets)} projections of each layer: {small.num_bytes / 1e6:.2f} MB over"
        f" {large.num_bytes / 1e6:.1f} MB; publisher, root, second relay, embedded engine on one host, AdamW at"
        f" {RATE:g} between versions"
    )
    timed = (
        f"{setting}; from the publishing call until the engine serves it:"
        f" {1000 * median(seconds['adapted']):.0f} ms over {1000 * median(seconds['full']):.0f} ms;"
        f" {small.wire_bytes / 1e6:.2f} and {large.wire_bytes / 1e6:.1f} MB over the wire; {ratio}"
    )
    return [
        Row("lora_bytes_over_full", small.num_bytes / large.num_bytes, "of the bytes", setting),
        Row("lora_refresh_over_full", ratio.median, "of the time", timed),
    ]
