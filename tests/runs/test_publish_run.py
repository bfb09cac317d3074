"""A whole run whose learner has two ranks: both write each version, also after one of them was killed."""

import os
import signal

import pytest

from laminar_lab.audit.queries import accounting
from laminar_lab.audit.verify import verify
from tests.runs.runs import ALONE, TrainProcess
from tests.runs.test_mixture_run import make_mixture
from tests.runs.test_train import starts_of

NO_SETS = ("eval.sets={}", "eval.every_steps=null")


@pytest.mark.slow
@pytest.mark.parametrize("mixture", [False, True])
def test_two_ranks_publish_what_engines_and_probes_agree_with(tmp_path, mixture):
    """Alarms compare the engine's digests, and its probes with the learner's (law 13); each would stop the run."""
    model = [f"model.path={make_mixture(tmp_path / 'data')}"] if mixture else []
    with TrainProcess(tmp_path, *ALONE, *NO_SETS, *model, "learner.world_size=2", "steps=6") as train:
        if not mixture:
            train.wait_for_step(2)
            os.kill(starts_of(train.run)["learner-1"][-1], signal.SIGKILL)
        code, output = train.finish()
    assert code == 0, output
    assert ("goes back to step" in output) is not mixture
    assert verify(train.run) == []
    assert accounting(train.run).balanced
