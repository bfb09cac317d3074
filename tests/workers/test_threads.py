"""Threads of the processes that compute: one where parts share cores, a share of them where a rank has its own."""

import os
import subprocess
import sys

import pytest

from laminar_py.config.loading import load_config
from laminar_py.runtime.workers.processes.base import learner_threads
from tests.runs.runs import REPO

GPUS, LAPTOP = "experiments/math_long_cot/7b_8gpu", "configs/quickstart"


@pytest.mark.parametrize(
    ("name", "settings", "threads"),
    [
        (GPUS, ["learner.offload=true"], 32),
        (GPUS, [], 1),
        (LAPTOP, [], 1),
        (LAPTOP, ["cluster.learner_device=cuda", "learner.offload=true"], 1),  # beside engines on the cores
    ],
)
def test_a_rank_that_updates_weights_on_the_host_has_its_share_of_the_cores(name, settings, threads):
    config = load_config(REPO / f"{name}.yaml", settings)
    assert learner_threads(config, num_cores=96, ranks_here=3) == threads
    assert learner_threads(config, num_cores=1, ranks_here=3) == 1


def test_the_threads_of_a_part_are_its_own_choice_whatever_its_environment_says():
    code = (
        "import torch; from laminar_py.runtime.workers.processes.base import compute_on\n"
        "before = torch.get_num_threads(); compute_on(3); print(before, torch.get_num_threads())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "3"]
