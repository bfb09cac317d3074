"""A run that comes to no step is ended with a line; one that is merely slow is not."""

import pytest

from laminar_lab.simulate.stalls import STALLED_S, StallWatch
from laminar_py.config.section import ConfigError
from tests.simulate.small import small

LIMIT_S = STALLED_S / 20  # by the clock of the run


def look(watch, now_s, *, step=0, ended=0, moved=0, waits=False):
    watch.look(now_s, step=step, ended=ended, moved=(moved, 0), waits=waits)


def test_a_run_in_which_nothing_moves_is_ended():
    watch = StallWatch(small())
    look(watch, 0.0)
    look(watch, LIMIT_S - 1)
    with pytest.raises(ConfigError, match="no response has got any further for 100000 s of the GPUs; lower it"):
        look(watch, LIMIT_S + 1)


def test_a_run_that_moves_or_waits_for_what_is_sure_to_come_goes_on():
    watch = StallWatch(small())
    for place in range(10):
        look(watch, place * 0.9 * LIMIT_S, moved=place)
    for place in range(10, 20):
        look(watch, place * 0.9 * LIMIT_S, moved=9, waits=True)


def test_a_run_whose_responses_all_end_in_vain_is_ended_and_steps_count_anew():
    watch, batch = StallWatch(small()), 48 * 8
    for step in range(5):
        look(watch, step, step=step, ended=step * 100 * batch, moved=step)
    with pytest.raises(ConfigError, match="since step 4, and the next one is not full, since groups are dropped"):
        look(watch, 5, step=4, ended=1000 * batch, moved=5)
