"""Forward and backward passes over packed sequences: row `packed_tokens_per_s` of `laminar bench learner`.

`benchmarks.learner.packing` trains on the same batches padded.
"""

import statistics
from dataclasses import dataclass

from transformers import PretrainedConfig

from laminar_lab.bench.learner.parts import (
    MAX_TOKENS,
    draw_lengths,
    gradient,
    make_learner,
    make_trajectories,
    pack_here,
)
from laminar_lab.bench.models import SMALL, count_parameters, write_model
from laminar_lab.bench.report import Row
from laminar_lab.bench.turns import cpu_s, in_turn
from laminar_lab.bench.workplace import workplace
from laminar_py.learner.step import Learner
from laminar_py.records.trajectory import Trajectory

RATE = "real tokens/CPU-s"


@dataclass(frozen=True, slots=True)
class StepBatches:
    """Batches of log-normal lengths, another for each round."""

    model: PretrainedConfig
    sequences: int = 64
    median: int = 128
    repeats: int = 3

    def draw(self, number: int) -> list[Trajectory]:
        """Trajectories of a round."""
        lengths = draw_lengths(self.sequences, median=self.median, seed=number)
        return make_trajectories(lengths, vocab=self.model.vocab_size)

    def tell(self) -> str:
        """Conditions, for a table."""
        return (
            f"arrays, forward and backward; {self.sequences} log-normal lengths (median {self.median}, p95 5 times"
            f" that), {count_parameters(self.model) / 1e6:.0f}M parameters, fp32; median of {self.repeats} batches"
        )


FULL = StepBatches(SMALL)


def rows(*, batches: StepBatches = FULL) -> list[Row]:
    """Rate of packed training, in tokens that are no padding."""
    with workplace() as folder:
        learner = make_learner(write_model(folder, batches.model))

    def train(number: int) -> float:
        return packed_tokens_per_s(learner, batches.draw(number))

    rates = in_turn({"packed": train}, rounds=batches.repeats)["packed"]
    return [Row("packed_tokens_per_s", statistics.median(rates), RATE, batches.tell())]


def packed_tokens_per_s(learner: Learner, items: list[Trajectory]) -> float:
    """Tokens a CPU second, packing included."""
    took_s = cpu_s(lambda: gradient(learner, pack_here(items, max_tokens=MAX_TOKENS)))
    return sum(item.num_tokens for item in items) / took_s
