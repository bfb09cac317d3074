"""Figures of evaluations against the answers on record."""

import pytest

from laminar_py.ledger.audit.verify import verify
from laminar_py.records.trajectory import Kind
from tests.builders import make_evaluated
from tests.ledger.runs import begin, issue, open_ledger, run_to, score


@pytest.mark.parametrize(("reward", "is_found"), [(1.0, False), (0.0, True)])
async def test_figures_that_do_not_follow_from_the_answers_are_found(tmp_path, reward, is_found):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1))
        issue(ledger, "e0-heldout.0", kind=Kind.EVAL)
        run_to(ledger, "e0-heldout.0", [(1, 0, 7)])
        score(ledger, "e0-heldout.0", [(1, 0, 7)], reward=reward)
        ledger.append(make_evaluated(1.0, version=1, step=1, problems=1, length=7))
    lines = [str(violation) for violation in verify(tmp_path)]
    assert any("evaluation e0-heldout: says accuracy 1.000" in line for line in lines) == is_found
