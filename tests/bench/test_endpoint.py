"""The benchmark of the endpoint in its smallest form, and what is made of times that are known."""

from dataclasses import replace

import pytest

from laminar_lab.bench.endpoint.agents import MANY, ONE, ONE_TIMES, rows, table
from laminar_lab.bench.endpoint.conversations import ComparedRound, Timed
from tests.bench.figures import figures

NAMES = ("endpoint", "agents")


def compared(endpoint_s, engine_s, *, added_s=0.002):
    engine = Timed(wall_s=engine_s, first_s=[[0.01, 0.02], [0.03, 0.04]])
    first_s = [[first + added_s for first in turns] for turns in engine.first_s]
    return ComparedRound(Timed(wall_s=endpoint_s, first_s=first_s), engine)


def test_the_row_is_the_lower_of_streams_and_whole_answers():
    found = figures(*NAMES, table(MANY, ONE, [[compared(10.0, 9.5)], [compared(10.0, 9.0)], [compared(1.0, 1.0)]]))
    assert found["endpoint_over_engine"] == found["endpoint_over_engine_whole"] == pytest.approx(0.9)
    assert found["endpoint_over_engine_stream"] == pytest.approx(0.95)
    assert found["endpoint_added_ms"] == pytest.approx(2.0)


@pytest.mark.slow
def test_every_figure_comes_and_the_engine_is_asked_the_same():
    cases = {"many": replace(MANY, agents=3, turns=2, tokens=(2, 6)), "one": replace(ONE, turns=2, tokens=(2, 4))}
    heard = []
    found = figures(*NAMES, rows(repeats=1, tell=heard.append, **cases))
    assert len(heard) == 2 * (2 + ONE_TIMES), "with one to warm up"
    assert found["endpoint_stream_tokens_per_s"] > 0
    assert found["endpoint_added_ms"] <= found["endpoint_added_p95_ms"]
