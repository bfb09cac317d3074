"""The benchmarks of turns and of the endpoint in their smallest form, and their figures of known times."""

from dataclasses import replace

import pytest

from laminar_lab.bench.endpoint import agents
from laminar_lab.bench.endpoint.agents import MANY, ONE, ONE_TIMES, ComparedRound, table
from laminar_lab.bench.turns import added
from laminar_lab.bench.turns.added import turn_times
from laminar_lab.bench.turns.replica import TimedRound
from tests.bench.figures import figures


def compared(endpoint_s, engine_s, *, added_s=0.002):
    engine = TimedRound(wall_s=engine_s, first_s=[[0.01, 0.02], [0.03, 0.04]])
    first_s = [[first + added_s for first in turns] for turns in engine.first_s]
    return ComparedRound(TimedRound(wall_s=endpoint_s, first_s=first_s), engine)


def test_a_turn_adds_what_the_engine_alone_does_not_take_in_turns_after_the_first():
    answered = [[0.0, 1.0, 2.0], [5.0, 6.0]]
    firsts = [[0.5, 1.010, 2.020], [5.5, 6.030]]
    alone = [[0.0, 0.004, 0.008], [0.0, 0.004]]
    times = turn_times(answered, firsts, alone)
    assert (times.total, times.engine, times.added) == pytest.approx((20.0, 4.0, 12.0))


def test_the_rows_are_ratios_of_rates_and_the_time_added_to_first_tokens():
    rounds = [[compared(10.0, 9.5)], [compared(10.0, 9.0)], [compared(1.0, 1.0)]]
    found = figures("endpoint", "agents", table(MANY, ONE, rounds))
    assert found["endpoint_over_engine_whole"] == pytest.approx(0.9)
    assert found["endpoint_over_engine_stream"] == pytest.approx(0.95)
    assert found["endpoint_added_ms"] == pytest.approx(2.0)


@pytest.mark.slow
def test_the_figures_of_turns_come_once_and_a_turn_takes_longer_than_its_engine(capsys):
    found = figures("turns", "added", added.rows(repeats=1, count=1))
    assert 0 < found["turn_engine_ms"] < found["turn_total_ms"]
    assert found["turn_added_ms"] is not None
    assert capsys.readouterr().err.count(" added ") == 2


@pytest.mark.slow
def test_every_figure_of_the_endpoint_comes_and_the_engine_gets_the_same_requests(capsys):
    cases = {"many": replace(MANY, agents=3, turns=2, tokens=(2, 6)), "one": replace(ONE, turns=2, tokens=(2, 4))}
    found = figures("endpoint", "agents", agents.rows(repeats=1, **cases))
    assert capsys.readouterr().err.count("first token") == 2 * (2 + ONE_TIMES), "with one round to warm up"
    assert found["endpoint_over_engine_stream"] > 0 < found["endpoint_over_engine_whole"]
    assert found["endpoint_added_ms"] is not None
