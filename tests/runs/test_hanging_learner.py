"""Ranks of a learner that stand still: a stopped rank is named and replaced, one that computes is waited for."""

import os
import re
import signal
import time

import psutil
import pytest

from tests.runs.runs import TrainProcess, assert_laws
from tests.runs.test_train import starts_of

RECOVERS_S = 90.0
COMPUTES_S = 65  # more than ranks that do not compute get
SETTINGS = (
    "learner.world_size=3",
    "rollout.replicas=1",
    "relay.nodes=1",
    "eval.sets={}",
    "steps=100000",
    "warm_start=null",
)
SLEEPY = """
import time
from pathlib import Path

def objective(inputs, settings):
    if Path({go!r}).exists():
        try:
            Path({mark!r}).touch(exist_ok=False)  # one rank, in one microbatch
            time.sleep({seconds})
        except FileExistsError:
            pass
    return inputs.logprobs * inputs.advantages
"""


def steps_of(train):
    path = train.run / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def end(train):
    train.send(signal.SIGINT)
    output = train.end_with(130)
    assert_laws(train.run)
    return output


@pytest.mark.slow
def test_a_stopped_rank_is_named_killed_and_replaced_within_90_s(tmp_path):
    with TrainProcess(tmp_path, *SETTINGS) as train:
        train.wait_for_step(3)
        before = steps_of(train)
        stopped = psutil.Process(starts_of(train.run)["learner-1"][-1])
        os.kill(stopped.pid, signal.SIGSTOP)
        began = time.monotonic()
        train.wait_until(lambda: len(starts_of(train.run)["learner-1"]) > 1)
        train.wait_for_step(before + 2)  # rows of steps that are done again are rows, too
        assert time.monotonic() - began < RECOVERS_S
        assert not stopped.is_running()
        assert {len(starts_of(train.run)[f"learner-{rank}"]) for rank in range(3)} == {2}
        output = end(train)
    (line,) = re.findall(r"the learner goes back to step .*", output)
    assert re.search(
        r"\(learner-1: no answer to position in 30 s; rank 1 on 127\.0\.0\.1 was last seen in: \w", line
    )


@pytest.mark.slow
def test_a_rank_that_computes_for_more_than_a_minute_is_waited_for(tmp_path):
    go, mark, loss = tmp_path / "go", tmp_path / "slept", tmp_path / "sleepy.py"
    loss.write_text(SLEEPY.format(go=str(go), mark=str(mark), seconds=COMPUTES_S))
    with TrainProcess(tmp_path, *SETTINGS, f"algorithm.objective={loss}:objective") as train:
        train.wait_for_step(2)
        go.touch()
        train.wait_until(mark.is_file)
        began, before = time.monotonic(), steps_of(train)
        train.wait_for_step(before + 2)
        assert time.monotonic() - began > COMPUTES_S - 1, "the other ranks waited"
        assert {len(starts_of(train.run)[f"learner-{rank}"]) for rank in range(3)} == {1}
        assert "goes back" not in end(train)
