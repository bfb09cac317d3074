"""Whole runs with a teacher: as a stage of the run, and on a server."""

import json
import shutil
import signal

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engines.sglang.scoring_server import scoring_server
from tests.runs.runs import ALONE, TrainProcess, assert_laws, quickstart_model
from tests.runs.test_train import kill_part, summary_of

pytestmark = pytest.mark.slow
TAUGHT = ("algorithm.name=grpo", "algorithm.teacher_coef=0.5", "rollout.without_signal=train", *ALONE)


@pytest.fixture
def teacher(tmp_path):
    """A folder with random weights and the quickstart's tokenizer."""
    torch.manual_seed(5)
    folder = tmp_path / "teacher"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(quickstart_model())).save_pretrained(folder)
    shutil.copy(quickstart_model() / "tokenizer.json", folder)
    return folder


def test_a_teacher_is_asked_again_after_its_death_and_a_resume(tmp_path, teacher):
    """Beside a reference, which is a stage too."""
    stages = [f"algorithm.teacher={teacher}", "algorithm.kl_coef=0.1", "algorithm.reference_pass=stage"]
    with TrainProcess(tmp_path, "steps=10000", *TAUGHT, *stages) as train:
        train.wait_for_step(2)
        kill_part(train, "teacher-0")
        train.wait_for_step(5)
        train.send(signal.SIGINT)
        assert train.finish()[0] == 130
    assert summary_of(train.run)["restarts"]["teacher-0"] == 1
    steps = summary_of(train.run)["steps"] + 2
    with TrainProcess(tmp_path, f"steps={steps}", *TAUGHT, *stages, resume=True) as train:
        train.end_with(0)
    assert_laws(train.run)


def test_a_teacher_of_numbers_that_are_not_finite_ends_the_run_in_one_line(tmp_path, teacher):
    model = AutoModelForCausalLM.from_pretrained(teacher)
    torch.nn.init.constant_(model.model.norm.weight, float("inf"))
    model.save_pretrained(teacher)
    with TrainProcess(tmp_path, *TAUGHT, f"algorithm.teacher={teacher}") as train:
        code, output = train.finish()
    assert code != 0
    assert "algorithm.teacher: its log-probabilities of g" in output.splitlines()[-1]
    assert_laws(train.run)


def test_a_teachers_server_teaches_and_its_loss_ends_the_run_in_one_line(tmp_path, teacher):
    plain = AutoModelForCausalLM.from_pretrained(teacher)

    def score(ids):
        with torch.no_grad():
            logprobs = plain(torch.tensor(ids)[None]).logits[0].log_softmax(-1)
        return logprobs[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()

    with scoring_server(score, vocab=len(plain.get_input_embeddings().weight)) as server:
        server.model_path = str(teacher)
        served = (f"algorithm.teacher={server.url}", "supervisor.max_restarts=1", "steps=10000")
        with TrainProcess(tmp_path, *TAUGHT, *served) as train:
            train.wait_for_step(3)
            server.failing = 3  # a short outage, through which a batch is repeated
            train.wait_for_step(6)
            server.failing = 10**9
            kill_part(train, "teacher-0")  # another process cannot start without the server
            output = train.end_with(1)
    last = output.splitlines()[-1]
    assert "teacher-0 crashed 2 times" in last
    assert f"{server.url}: answered 503" in last
    assert_laws(train.run)
    rows = [json.loads(line) for line in (train.run / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert rows[-1]["reference_busy_s"] > 0
