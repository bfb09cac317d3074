"""The puzzles of tba, their verifier, and the curves that its run reads from a ledger."""

import random
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest

from experiments.tba import reward, run
from laminar_py.config.loading import load_config
from laminar_py.records.events import Dropped
from laminar_py.records.scoring import ScoringRequest
from laminar_py.records.trajectory import DropReason, FinishReason
from tests.experiments.folders import load_module
from tests.ledger.runs import begin, issue, open_ledger, run_to, score
from tests.report.builders import make_step_row

FOLDER = Path(__file__).parents[2] / "experiments/tba"


puzzle = load_module(FOLDER / "puzzle.py")


def scored(one, response):
    none = np.zeros(0, np.int32)
    fields = msgspec.json.encode({"numbers": one.numbers, "target": one.target})
    request = ScoringRequest(
        trajectory_id="a",
        prompt="",
        response=response,
        answer="",
        finish_reason=FinishReason.STOP,
        prompt_ids=none,
        response_ids=none,
        logprobs=none,
        fields_json=fields,
    )
    return reward.reached(request)


def test_a_guess_succeeds_in_less_than_two_cases_of_a_hundred_and_no_answer_is_alone():
    for one in islice(puzzle.puzzles(random.Random(1)), 20):
        right = [answer for answer in puzzle.ANSWERS if scored(one, answer).value == 1]
        assert right == one.right
        assert len(right) in puzzle.RIGHT
        assert len(right) / len(puzzle.ANSWERS) < 0.02


@pytest.mark.parametrize("response", ["", "+", "+++++++", "+++++x", "1+1"])
def test_what_is_no_answer_earns_nothing(response):
    one = puzzle.Puzzle((1, 1, 1, 1, 1, 1, 1), 7)
    assert scored(one, response).value == 0
    assert (scored(one, "++++++").value, scored(one, "++++++").answer) == (1, "++++++")


@pytest.mark.parametrize("name", run.ALGORITHMS)
def test_every_side_is_a_valid_config(name):
    config = load_config(
        FOLDER / "tba.yaml", [f"{field}={value}" for field, value in run.ALGORITHMS[name].items()]
    )
    assert config.algorithm.name == name
    assert (config.fresh_groups < config.rollout.prompts_per_step) == (name == "tba")


async def test_curves_come_from_the_scores_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "WINDOW", 2)
    monkeypatch.setattr(run, "LATE", 2)
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        for place, value in enumerate((0.0, 0.0, 1.0, 0.0, 1.0, 1.0)):
            issue(ledger, f"g{place % 3}.{place}", index=place % 3)
            run_to(ledger, f"g{place % 3}.{place}", [(0, 0, 5)])
            score(ledger, f"g{place % 3}.{place}", [(0, 0, 5)], reward=value)
        ledger.append(Dropped("g0.0", DropReason.NO_SIGNAL))
    found = run.read_search(tmp_path, [make_step_row(1, 1.0)])
    assert found.success == [0.0, 0.5, 1.0]
    assert found.found == [0, 1, 2], "no answer was given, so each puzzle has one"
    assert found.late == 2
    assert found.reached_s == found.seconds[1] > found.seconds[0] > 0
    assert run.rows({"tba": [found]})
