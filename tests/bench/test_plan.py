"""The planner's benchmark: its cases are drawn as promised."""

from laminar_lab.bench.plan.regret import MOST_PLACEMENTS, draw_case
from laminar_lab.plan.placements import placements


def test_cases_of_regret_are_of_64_gpus_at_most_and_the_same_every_time():
    for number in range(10):
        request = draw_case(number)
        assert request.fleet.gpus <= 64
        assert 0 < len(placements(request)) <= MOST_PLACEMENTS
        assert request == draw_case(number)
