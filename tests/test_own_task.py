"""docs/own_task.md: its script, config and samples as they stand there are checked, tried and trained on."""

import json
import re
import subprocess

import pytest

from tests.runs.runs import LAMINAR, REPO, forget_versions

PAGE = (REPO / "docs/own_task.md").read_text()
FILES = {"python": "make_mine.py", "yaml": "mine.yaml", "json": "samples.jsonl"}
FEW = ["steps=2", "warm_start.steps=3", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.every_steps=2"]
QUICK = ["rollout.batch_per_replica=16", "rollout.without_signal=train", "rollout.replicas=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("own_task")
    for kind, name in FILES.items():
        (text,) = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S)
        (path / name).write_text(text)
    return path


def laminar(folder, *arguments):
    return subprocess.run(
        [LAMINAR, *arguments], cwd=folder, check=True, capture_output=True, text=True, timeout=240
    )


def test_the_data_are_shown_and_samples_have_the_rewards_that_the_page_wants(folder):
    assert "4,000" in laminar(folder, "data", "mine.yaml").stdout
    assert "0 failed, 0 disagree" in laminar(folder, "reward", "try", "mine.yaml", "samples.jsonl").stdout


def test_the_config_trains(folder):
    laminar(folder, "train", "mine.yaml", *FEW, *QUICK)
    run = folder / "runs/mine-1"
    forget_versions(run)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads((run / "summary.json").read_text())["unscored"]["count"] == 0
