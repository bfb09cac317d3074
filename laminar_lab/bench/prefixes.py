"""Samples that share their prompt in a packed row, beside the same samples as sequences of their own.

Real tokens are prompts and responses of all samples, however often a row has them. Both sides compute the same
loss and gradients. Memory is what a pass adds to the process at its peak.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median

import msgspec
import numpy as np
from transformers import PretrainedConfig

from laminar_lab.bench.context import measured_pass
from laminar_lab.bench.report import Ratio, Row, in_turn
from laminar_lab.bench.workplace import SMALL, count_parameters, workplace, write_model
from laminar_lab.calibration.learner import make_trajectory
from laminar_py.config import AlgorithmConfig
from laminar_py.config.algorithm import Aggregation
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import LearnerConfig
from laminar_py.learner import Learner
from laminar_py.learner.packing import pack
from laminar_py.records import Trajectory
from laminar_py.records.trajectory import MicroBatch

SAMPLES = 16
SHAPES = {"4_1": (512, 128), "1_1": (256, 256), "1_4": (96, 384)}  # tokens of prompt and of each response
MAX_TOKENS = 8192


def rows(*, repeats: int, scale: int = 1, config: PretrainedConfig = SMALL) -> list[Row]:
    """Compare both sides at each ratio of prompt to response; medians of `repeats` rounds in turn.

    Samples have 1 / `scale` of the tokens of `SHAPES`.
    """
    found = []
    with workplace() as folder:
        model = ModelConfig(path=write_model(folder, config))
        learner = Learner(model, LearnerConfig(), AlgorithmConfig(), temperature=1.0, seed=0)
        for name, shape in SHAPES.items():
            prompt, response = (tokens // scale for tokens in shape)
            shared, alone = (_batches(prompt, response, shares=shares) for shares in (True, False))
            tokens = SAMPLES * (prompt + response)
            rates = in_turn(
                {
                    "shared": partial(_rate, learner, shared, tokens),
                    "alone": partial(_rate, learner, alone, tokens),
                },
                rounds=repeats,
                warm=1,
            )
            peaks = [measured_pass(learner, batches)[0] for batches in (shared, alone)]
            setting = (
                f"forward and backward of {SAMPLES} samples of a prompt of {prompt} tokens with {response} each,"
                f" {count_parameters(config) / 1e6:.0f}M parameters, fp32, rows of {MAX_TOKENS:,} tokens; shared:"
                f" {sum(batch.num_tokens for batch in shared):,} tokens in {len(shared)} rows,"
                f" {median(rates['shared']):,.0f} real tokens a CPU second; median of {repeats} rounds"
            )
            found.append(Ratio.between(rates["shared"], rates["alone"]).row(f"tree_over_separate_{name}", setting))
            found.append(Row(f"tree_memory_{name}", peaks[0] / peaks[1], "x, peak of the pass", setting))
    return found


def _batches(prompt: int, response: int, *, shares: bool) -> Sequence[MicroBatch]:
    """Return the microbatches of a group; without `shares` every sample has a prompt of its own."""
    items = [_sample(place, prompt, response, common=shares) for place in range(SAMPLES)]
    packed = pack(items, max_tokens=MAX_TOKENS, ranks=1, aggregation=Aggregation.TOKEN_MEAN, attention_share=0.0)
    return packed.microbatches(0)


def _sample(place: int, prompt: int, response: int, *, common: bool) -> Trajectory:
    ids = np.random.default_rng(0 if common else place).integers(1, 512, prompt).astype(np.int32)
    item = make_trajectory(place, prompt + response, prompt=ids)
    return msgspec.structs.replace(item, group_id="g0")


def _rate(learner: Learner, batches: Sequence[MicroBatch], tokens: int, _: int) -> float:
    learner.model.zero_grad()
    return tokens / measured_pass(learner, batches)[1]
