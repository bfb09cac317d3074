"""The emulated learner: how long a step takes, what it publishes, and where it goes on."""

from dataclasses import dataclass

import pytest
import torch

from laminar_lab.emulation.learner import EmulatedLearner
from laminar_lab.emulation.settings import LearnerTimes
from laminar_py.learner.marker import MARKER
from laminar_py.learner.packing import RowSize

TIMES = LearnerTimes(
    train_tokens_per_s=1000.0, num_parameters=10**12, hidden_size=1, num_layers=1, optimizer_s=2.0
)  # parameters enough that attention counts for nothing


@dataclass
class Packed:
    lengths: list[int]

    @property
    def num_tokens(self):
        return sum(self.lengths)

    @property
    def squares(self):
        return sum(length**2 for length in self.lengths)


class Clock:
    """Time that passes only while the learner sleeps, or by itself before it looks again."""

    def __init__(self):
        self.now_s = 0.0

    def now(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def make_learner(clock=None, *, devices=1, compression=1.0, times=TIMES):
    clock = clock or Clock()
    return EmulatedLearner(times, devices=devices, compression=compression, now=clock.now, sleep=clock.sleep)


def tensors(learner):
    return dict(learner.named_tensors(dtype=torch.bfloat16))


def equal(some, others):
    return all(torch.equal(some[name], others[name]) for name in some | others)


def test_a_step_takes_the_time_of_its_tokens_and_the_optimizers():
    clock = Clock()
    metrics = make_learner(clock, compression=20.0).step([Packed([300, 200]), Packed([500])])
    assert clock.now_s == metrics.elapsed_s == pytest.approx((2 + 1) / 20)
    assert metrics.tokens_per_s == pytest.approx(1000 * 20 / 3)
    assert metrics.mfu is None, "what it stands for computes nothing"


def test_devices_share_whole_microbatches():
    batches = [RowSize(length, 0) for length in (4000, 3000, 2000, 1000)]
    assert TIMES.step_s(batches, devices=2) == pytest.approx(2 + 5)
    assert TIMES.step_s(batches, devices=8) == pytest.approx(2 + 4)


def test_a_long_sequence_costs_more_than_short_ones_of_as_many_tokens():
    times = TIMES.model_copy(update={"num_parameters": 7_600_000_000, "hidden_size": 3584, "num_layers": 28})
    long, short = (
        times.step_s(batch, devices=1) for batch in ([RowSize(16_000, 16_000**2)], [RowSize(16_000, 40 * 400**2)])
    )
    assert long > 1.1 * short


def test_the_time_that_reading_the_microbatches_takes_is_not_added():
    clock = Clock()

    class Slow(Packed):
        def __getattribute__(self, name):
            clock.now_s += 0.25
            return super().__getattribute__(name)

    make_learner(clock).step([Slow([1000])])
    assert clock.now_s == pytest.approx(3)


def test_every_step_makes_other_weights_and_a_checkpoint_brings_them_back(tmp_path):
    learner = make_learner()
    first = tensors(learner)
    learner.step([Packed([10])])
    learner.begin_save(tmp_path / "step-1")
    second = tensors(learner)
    assert not equal(first, second)
    learner.step([Packed([10])])
    learner.begin_save(tmp_path / "step-1")  # again
    restored = make_learner()
    restored.load(tmp_path / "step-1")
    assert restored.steps_taken == 2
    assert equal(tensors(restored), tensors(learner))
    assert not equal(tensors(restored), second)


def test_a_torn_checkpoint_is_refused(tmp_path):
    make_learner().begin_save(tmp_path / "torn")
    (tmp_path / "torn" / MARKER).unlink()
    with pytest.raises(ValueError, match="half written"):
        make_learner().load(tmp_path / "torn")
