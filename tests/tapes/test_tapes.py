"""Control plane on tape: fleets decide what they decided when the tapes were recorded, line by line.

Whoever changes a decision on purpose records anew (`python -m tests.tapes.record`) and says so.
"""

from itertools import zip_longest

import pytest

from tests.tapes.plans import PLANS
from tests.tapes.record import read, record

SHOWN = 3  # lines before the first difference


@pytest.mark.parametrize("seed", range(len(PLANS)))
def test_a_fleet_decides_what_is_on_its_tape(seed):
    expected, got = read(seed), record(seed)
    for number, (was, now) in enumerate(zip_longest(expected, got), start=1):
        if was != now:
            before = "\n".join(f"          {line}" for line in expected[max(0, number - 1 - SHOWN) : number - 1])
            pytest.fail(f"fleet {seed}, line {number}:\n{before}\nexpected: {was}\ngot:      {now}", pytrace=False)
