"""The benchmark of turns in its smallest form, and what is made of times that are known."""

from dataclasses import replace

import pytest

from laminar_lab.bench.turns.added import COMPUTED, LONG, SHORT, TurnTimes, rows
from laminar_lab.bench.turns.replica import PlayedTurn
from tests.bench.figures import figures


def test_what_is_added_is_what_the_engine_alone_does_not_take_in_turns_after_the_first():
    answered = {"a": [0.0, 1.0, 2.0], "b": [5.0, 6.0]}
    firsts = {"a": [0.5, 1.010, 2.020], "b": [5.5, 6.030]}
    played = {
        name: [PlayedTurn(first_s=first, alone_s=0.004 * place) for place, first in enumerate(moments)]
        for name, moments in firsts.items()
    }
    times = TurnTimes.of(answered, played)
    assert (times.total, times.engine, times.added) == pytest.approx((20.0, 4.0, 12.0))


@pytest.mark.slow
def test_every_figure_comes_once_and_is_positive():
    cases = [replace(case, count=1, turns=4) for case in (SHORT, LONG, COMPUTED)]
    heard = []
    found = figures("turns", "added", rows(repeats=1, tell=heard.append, cases=cases))
    assert 0 < found["turn_engine_ms"] < found["turn_total_ms"]
    assert found["turn_2000_kept_ms"] > 0 < found["turn_2000_computed_ms"]  # which is less depends on the load
    assert len(heard) == 2 * len(cases)
