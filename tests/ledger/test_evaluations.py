"""Evaluations as the ledger gives them back."""

import msgspec

from laminar_py.ledger.database import reading
from laminar_py.ledger.evaluations import evaluations_on_record, of_first_set, read_evaluations
from laminar_py.records.estimates import set_figures
from tests.builders import make_answers, make_evaluated
from tests.ledger.runs import begin, open_ledger


async def test_the_mean_of_a_set_is_an_accuracy_in_all_of_its_passes_or_in_none(tmp_path):
    first = make_evaluated(0.0, step=0, rl_s=0.0, set_name="bonus")
    plain = make_evaluated(0.5, step=0, rl_s=0.0, set_name="plain", index=1)
    later = msgspec.structs.replace(
        make_evaluated(set_name="bonus", index=2), figures=set_figures(make_answers([[0.4], [0.0]]), samples=1)
    )
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        ledger.append_all([first, plain])
        await ledger.commit()
        assert [one.figures.name for one in read_evaluations(tmp_path)] == ["accuracy", "accuracy"]
        ledger.append(later)
    with reading(tmp_path) as connection:
        told = {one.pass_id: one.figures for one in evaluations_on_record(connection)}
    assert {id: figures.name for id, figures in told.items()} == {
        "e0-bonus": "mean reward",
        "e1-plain": "accuracy",
        "e2-bonus": "mean reward",
    }
    assert (told["e0-bonus"].pass_at, told["e0-bonus"].mean) == ({}, first.figures.mean)
    assert told["e0-bonus"].tell().startswith("mean reward 0.000 (0.000 to 0.000) on 8 problems")


def test_the_first_set_is_that_of_the_config_whichever_was_on_record_first():
    small, late, first = (
        make_evaluated(index=index, set_name=name, step=step, rl_s=float(step))
        for index, name, step in ((1, "small", 0), (3, "small", 1), (2, "aime", 1))
    )
    assert of_first_set([small, late, first], ["aime", "small"]) == [first]
    assert of_first_set([small, late], ["aime", "small"]) == [small, late]
    assert of_first_set([], ["aime"]) == []
