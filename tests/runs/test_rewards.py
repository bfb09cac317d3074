"""A reward that fails: what the terminal says, how the run ends, and that it goes on once the reward is mended."""

import json
import re
import subprocess

import pytest

from laminar_lab.audit.queries import accounting
from laminar_lab.audit.verify import verify
from laminar_py.records.trajectory import DropReason
from tests.runs.runs import ALONE, LAMINAR, PATIENCE_S, REPO, TrainProcess
from tests.runs.test_emulated_run import CONFIG, SETTINGS

BROKEN = """
from pathlib import Path

CALLED = Path(__file__).with_name("called")

def score(request):
    if not CALLED.exists():  # the try before the run
        CALLED.touch()
        return 0.0
    raise KeyboardInterrupt("\\ud800")
"""
MENDED = """
def score(request):
    if len(request.response_ids) % 9 == 0:
        raise KeyboardInterrupt
    return len(request.response_ids) % 2
"""


@pytest.mark.slow
def test_a_reward_that_always_fails_ends_the_run_which_goes_on_once_it_is_mended(tmp_path):
    reward = tmp_path / "mine.py"
    settings = (*SETTINGS, *ALONE, "repack.planner=none", f"reward.use=[{reward}:score]")
    reward.write_text(BROKEN)
    with TrainProcess(tmp_path, *settings, config=CONFIG) as train:
        output = train.end_with(1)
    lines = [line for line in output.splitlines() if f"reward.use={reward}:score: " in line]
    assert all("KeyboardInterrupt: \\ud800" in line and f"(at {reward}:10)" in line for line in lines)
    trial, first, end = lines[0], lines[1], lines[-1]
    assert "(a trial, made up)" in trial
    assert re.search(r": g\d+\.\d could not be scored", first), "a real response"
    assert end.startswith("laminar: ")
    assert end.endswith("mend the reward and continue with --resume")
    assert "Traceback" not in output
    assert verify(train.run) == []
    reward.write_text(MENDED)
    command = [LAMINAR, "train", str(CONFIG), "name=small", f"runs={tmp_path}", "--resume"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "responses could not be scored; the first: KeyboardInterrupt" in done.stdout.splitlines()[-1]
    assert json.loads((train.run / "summary.json").read_text())["restarts"] == {}, "no scorer died over it"
    account = accounting(train.run)
    assert account.balanced
    assert account.train.dropped[DropReason.REWARD_FAILED] > 0
    assert account.train.consumed > 0
    assert verify(train.run) == []
