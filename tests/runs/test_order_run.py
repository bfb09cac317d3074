"""A run whose order of problems learns from their groups, stopped and resumed, is the run that was not."""

import json
import signal
import sqlite3
from contextlib import closing

import pytest

from laminar_lab.audit.verify import verify
from tests.runs.runs import ALONE, REPO, TrainProcess

STEPS = 6
REWARD = """def score(request):
    level = int(request.prompt[-2]) % 3
    return float(sum(request.response_ids) % 2) if level == 1 else float(level == 0)
"""


def start(folder, order, *, resume=False):
    """Problems of three levels: solved, of two minds, hopeless."""
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    lines = (REPO / "experiments/quickstart/data/train.jsonl").read_text().splitlines()
    problems = [json.loads(line) for line in lines]
    found = {int(one["prompt"][-2]) % 3: one for one in reversed(problems[:200])}
    more = [{**one, "id": f"{level}-{copy}", "level": level} for level, one in found.items() for copy in range(2)]
    (folder / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in more))
    settings = ["schedule=sync", *ALONE, "eval.sets={}", f"steps={STEPS}", "data.prepare=null"]
    settings += [f"reward.use=[{folder / 'reward.py'}:score]", f"data.train={folder / 'train.jsonl'}"]
    settings += ["data.order=" + order, "data.level_groups=4"]
    return TrainProcess(folder, *settings, resume=resume)


def issued(run):
    """Problem at each place."""
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        query = (
            "SELECT DISTINCT prompt_index, prompt_id FROM trajectory WHERE kind = 'train' ORDER BY prompt_index"
        )
        return ledger.execute(query).fetchall()


@pytest.mark.parametrize("order", ["signal", pytest.param("curriculum", marks=pytest.mark.slow)])
def test_a_resumed_run_draws_the_problems_that_an_uninterrupted_one_would(tmp_path, order):
    whole, cut = start(tmp_path / "whole", order), start(tmp_path / "cut", order)
    with whole, cut:
        cut.wait_for_step(3)
        cut.send(signal.SIGINT)
        assert cut.finish()[0] == 130
        with start(tmp_path / "cut", order, resume=True) as resumed:
            resumed.end_with(0)
        whole.end_with(0)
    assert issued(cut.run) == issued(whole.run)
    rows = [(run / "metrics.jsonl").read_text().splitlines() for run in (cut.run, whole.run)]
    figures, others = ([json.loads(row)["order"] for row in of] for of in rows)
    assert figures == others
    assert figures[-1]
    assert verify(cut.run) == []
