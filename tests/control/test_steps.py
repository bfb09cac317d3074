"""What the learner is given of a step."""

import pytest

from laminar_py.config.loading import load_config
from laminar_py.control.consumption import StepBatch
from laminar_py.control.steps import pack_step
from laminar_py.learner.packing.buffer import ReadyGroup
from laminar_py.learner.packing.packer import Packed
from tests.builders import make_finished, make_trajectory
from tests.runs.runs import REPO


def test_what_has_no_signal_takes_its_part_of_a_step():
    item = make_finished("a", response=4)
    groups = [
        ReadyGroup(oldest_version=0, arrival=0, group_id="g0", members=[item]),
        ReadyGroup(oldest_version=0, arrival=1, group_id="g1", tokens_without_signal=(3, 5)),
    ]
    batch = StepBatch(version=0, groups=groups, trajectories=[item], ages={0: 0})
    config = load_config(REPO / "configs/quickstart.yaml", ["algorithm.aggregation=token_mean"])
    packed = pack_step(config, batch, attention_share=0.0, shares=True)
    assert packed.bundles == [[[item]]]
    complete = Packed([[[make_trajectory("a", response=4)]]], packed.weights)
    assert sum(one.loss_weights.sum() for one in complete.microbatches(0)) == pytest.approx(4 / 12)
