"""Fleets with long contexts lose nothing by repacking."""

import pytest

from experiments.repack.long_contexts import FLEETS, LEAST, LongFleet, draw, gain

SMALL = {"replicas": 8, "table": "h100_32b_tp2", "prompt": 8000, "latency_s": 1.0, "group": 2}


def test_a_small_fleet_of_long_conversations_loses_nothing_by_repacking():
    fleet = LongFleet(**SMALL, turns=8, own=200, observed=5000, batch=4, steps=6)
    assert gain(fleet, seed=1) >= LEAST


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FLEETS))
def test_no_fleet_with_long_contexts_loses_by_repacking(seed):
    assert gain(draw(seed), seed=seed) >= LEAST
