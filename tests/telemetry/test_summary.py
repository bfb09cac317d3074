"""What the summary says of relay and checkpoints, from the ledger of a run."""

import pytest

from laminar_lab.report.closing import checkpoint_summary, closing_table, relay_summary
from laminar_py.observe.summary import (
    CheckpointFigures,
    RelayFigures,
    UnscoredFigures,
    checkpoint_figures,
    relay_figures,
)
from laminar_py.records.events import Checkpointed, Dropped
from laminar_py.records.metrics import TurnFigures
from laminar_py.records.trajectory import DropReason, Kind
from tests.events import relayed, version_published
from tests.ledger.runs import begin, consume, issue, make_ready, open_ledger
from tests.report.builders import shown, summary_of
from tests.report.scripted import TURNS, WITH_ENVIRONMENT, scripted


def arrived(node, version, wire_bytes, elapsed_s):
    base = version - 1 if version else None
    return relayed(f"relay-{node}", version, num_bytes=1000, base=base, wire_bytes=wire_bytes, elapsed_s=elapsed_s)


def published(version, stall_s):
    return version_published(version, num_bytes=1000, stall_s=stall_s)


def test_the_relay_is_summed_up():
    events = []
    for version, stall_s in enumerate((0.1, 0.3, 0.0, 0.2)):  # the learner died over version 2
        events += [
            published(version, stall_s),
            arrived(0, version, 0, 0.0),
            arrived(1, version, 10 if version else 1000, 1.0 + version),
            arrived(2, version, 10 if version else 1000, 2.0),
        ]
    figures = relay_figures(events)
    assert figures == RelayFigures(4, 0.2, 2.5, 2060 / 8000)
    assert relay_summary(figures) == (
        "4 versions, the learner stood still 200.0 ms for one, 2.50 s until the last relay had it, 25.8% of whole"
        " versions travelled, the rest was as in the version before"
    )


def test_where_nothing_could_be_left_out_whole_versions_travelled():
    assert relay_summary(RelayFigures(3, None, None, 1.0)) == "3 versions, whole versions travelled"


def test_a_lone_root_has_nothing_to_say_of_the_wire():
    figures = relay_figures([published(0, 0.1), arrived(0, 0, 0, 0.0)])
    assert figures == RelayFigures(1, 0.1, None, None)
    assert relay_summary(figures) == "1 versions, the learner stood still 100.0 ms for one"


def test_checkpoints_are_summed_up():
    figures = checkpoint_figures(
        [
            Checkpointed(step=step, version=0, path="checkpoints/step", stall_s=stall_s, elapsed_s=0.5 + step)
            for step, stall_s in enumerate((0.1, 0.002, 0.003))
        ]
    )
    assert figures == CheckpointFigures(3, 0.003, 1.5)
    assert checkpoint_summary(figures) == "3, the learner stood still 3.0 ms for one, 1.50 s until it was on disk"


async def test_turns_are_summed_up_from_the_ledger_and_those_of_evaluations_left_out(tmp_path):
    async with scripted(tmp_path, WITH_ENVIRONMENT) as script:
        for index, (id, spans, seconds) in enumerate(
            [("g0.0", TURNS, 0.5), ("g1.0", TURNS[:1], 0.1), ("e0.0", TURNS, 9.0)]
        ):
            script.issue(0.0, id, index=index, kind=Kind.EVAL if id.startswith("e") else Kind.TRAIN)
            script.finish(4.0, id, length=spans[-1].end, spans=spans, environment_s=seconds)
    assert summary_of(tmp_path, has_environment=True).turns == TurnFigures(
        mean=1.5, environment_p50_s=pytest.approx(0.1), environment_p95_s=0.5
    )


async def test_what_could_not_be_scored_is_summed_up_with_the_first_reason(tmp_path):
    failures = [
        ("g0.0", Kind.TRAIN, DropReason.REWARD_FAILED, "KeyError: 4 (at mine.py:2)"),
        ("e0.0", Kind.EVAL, DropReason.REWARD_TIMEOUT, "no value"),
        ("g0.1", Kind.TRAIN, DropReason.GROUP_LOST, "1 survivors"),
    ]
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        make_ready(ledger, "g0.2")
        for id, kind, reason, detail in failures:
            issue(ledger, id, kind=kind)
            ledger.append(Dropped(id, reason, detail))
    assert summary_of(tmp_path).unscored == UnscoredFigures(2, 3, "KeyError: 4 (at mine.py:2)")


async def test_a_run_says_how_many_of_its_steps_trained(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        make_ready(ledger, "g0.0")
        ledger.append_all(consume(1, 0, "g0.0"))
        whole = closing_table(await flushed(ledger, tmp_path))
        ledger.append_all(consume(2, 0))
        some = closing_table(await flushed(ledger, tmp_path))
    assert shown(whole)["RL"] == "1 step in 0.0 s"
    assert shown(some)["RL"] == "2 steps in 0.0 s; 1 of 2 steps trained"


async def flushed(ledger, folder):
    await ledger.commit()
    return summary_of(folder)
