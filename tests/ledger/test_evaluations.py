"""Evaluations as the ledger gives them back."""

import msgspec

from laminar_py.control.evaluation import NO_STEP
from laminar_py.ledger.database import reading
from laminar_py.ledger.evaluations import evaluations_on_record, of_first_set, open_passes, read_evaluations
from laminar_py.records.evaluations import EvalAnswer, set_figures
from laminar_py.records.events import Consumed, Dropped, RolledBack
from laminar_py.records.trajectory import DropReason, Kind
from tests.builders import make_answers, make_evaluated
from tests.ledger.runs import begin, consume, finish, issue, open_ledger, run_to


async def test_the_mean_of_a_set_is_an_accuracy_in_all_of_its_passes_or_in_none(tmp_path):
    first = make_evaluated(0.0, step=0, rl_s=0.0, set_name="bonus")
    plain = make_evaluated(0.5, step=0, rl_s=0.0, set_name="plain", index=1)
    later = msgspec.structs.replace(
        make_evaluated(set_name="bonus", index=2),
        figures=set_figures(make_answers([[0.4], [0.0]]), samples=1, verdicts=["math"]),
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
    assert told["e0-bonus"].describe().startswith("mean reward 0.000 (0.000 to 0.000) on 8 problems")


async def test_a_term_has_an_accuracy_in_all_passes_of_a_set_or_in_none(tmp_path):
    verdicts, shares = ([[1.0], [0.0]], [[0.5], [0.0]])
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        for index, code in enumerate((verdicts, shares)):
            figures = set_figures(
                make_answers(verdicts, terms={"code": code, "math": verdicts}),
                samples=1,
                verdicts=["math", "code"],
            )
            ledger.append(msgspec.structs.replace(make_evaluated(index=index), figures=figures))
    first, later = (one.figures.terms for one in read_evaluations(tmp_path))
    assert [bool(term.pass_at) for term in (first["code"], later["code"])] == [False, False]
    assert [bool(term.pass_at) for term in (first["math"], later["math"])] == [True, True]
    assert first["code"].mean.value == 0.5


def test_the_first_set_is_that_of_the_config_whichever_was_on_record_first():
    small, late, first = (
        make_evaluated(index=index, set_name=name, step=step, rl_s=float(step))
        for index, name, step in ((1, "small", 0), (3, "small", 1), (2, "aime", 1))
    )
    assert of_first_set([small, late, first], ["aime", "small"]) == [first]
    assert of_first_set([small, late], ["aime", "small"]) == [small, late]
    assert of_first_set([], ["aime"]) == []


async def test_evaluations_of_weights_that_are_undone_are_none(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1, 2))
        ledger.append_all([*consume(1, 0), *consume(2, 1)])
        ledger.append(make_evaluated(0.25, step=1, version=1))
        ledger.append(make_evaluated(0.75, step=2, version=2, index=1))
        ledger.append(RolledBack(1, "learner_crashed"))
        ledger.append(make_evaluated(0.5, step=1, version=1, index=2, set_name="other"))
    assert [(one.step, one.figures.mean.value) for one in read_evaluations(tmp_path)] == [(1, 0.25), (1, 0.5)]


async def test_open_passes_are_those_begun_and_neither_done_nor_given_up_nor_of_weights_that_are_undone(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1, 2, 3))
        for sample, version in enumerate((1, 2)):
            issue(ledger, f"e6-mixed.{sample}", kind=Kind.EVAL)
            run_to(ledger, f"e6-mixed.{sample}", [(version, 0, 3)])
        ledger.append(make_evaluated(set_name="done", index=0))
        under = {"e0-done.0": 2, "e1-aime.0": 2, "e1-aime.1": 2, "e2-undone.0": 3, "e3-lost.0": 1, "e5.0": 2}
        for id, version in (under | {"e4-new.0": None}).items():
            issue(ledger, id, kind=Kind.EVAL)
            if version is not None:
                run_to(ledger, id, [(version, 0, 3)])
        finish(ledger, "e1-aime.1", [(2, 0, 3)], reward=0.25)
        ledger.append(Consumed(trajectory_id="e1-aime.1", step=NO_STEP, version=2, staleness=0, weight=0.0))
        ledger.append(Dropped("e3-lost.0", DropReason.RUN_ENDED))
        ledger.append_all([event for step in (1, 2, 3) for event in consume(step, step - 1)])
        ledger.append(RolledBack(2, "controller_crashed"))
    found = open_passes(tmp_path)
    assert [(one.id, one.version, one.step) for one in found] == [("e1-aime", 2, 2), ("e4-new", None, None)]
    assert [dict(one.answers) for one in found] == [
        {"e1-aime.1": EvalAnswer(problem=1, sample=1, reward=0.25, terms={"math": 0.25}, length=3)},
        {},
    ]
