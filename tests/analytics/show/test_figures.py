"""What the panels draw is what the record says, also where a step brought nothing."""

from contextlib import asynccontextmanager
from math import isnan

from laminar_py.analytics.read.snapshot import read_snapshot
from laminar_py.analytics.show.figures import curves
from laminar_py.analytics.show.timeline import make_timeline
from laminar_py.ledger.database import reading
from laminar_py.records.events import RunEnded
from tests.analytics.builders import make_step_row, write_rows
from tests.analytics.scripted import scripted


@asynccontextmanager
async def three_steps(run):
    """Rewards 1 and 0 are scored before the first step, none before the second, 0.5 before the third."""
    write_rows(run / "metrics.jsonl", [make_step_row(step, 10.0 * step) for step in (1, 2, 3)])
    async with scripted(run) as script:
        for id, scored_s, reward in (("g1.0", 3, 1.0), ("g2.0", 4, 0.0), ("g3.0", 25, 0.5)):
            script.issue(0, id)
            script.finish(scored_s - 1, id)
            script.score(scored_s, id, reward=reward)
            if id == "g2.0":
                script.step(10, 1, "g1.0")
                script.step(20, 2, "g2.0")
        script.step(30, 3, "g3.0")
        yield script


async def test_a_step_in_whose_time_nothing_was_scored_has_no_reward_and_not_the_reward_0(tmp_path):
    async with three_steps(tmp_path):
        pass
    first, second, third = curves(read_snapshot(tmp_path)).reward
    assert (first, third) == (0.5, 0.5)
    assert isnan(second)


async def test_the_bar_of_a_step_has_the_reward_of_what_it_trained_on(tmp_path):
    async with three_steps(tmp_path):
        pass
    steps = make_timeline(read_snapshot(tmp_path)).steps
    assert [step.reward for step in steps] == [1.0, 0.0, 0.5]


async def test_a_run_has_ended_when_it_says_so_and_is_heard_until_its_last_event(tmp_path):
    async with three_steps(tmp_path) as script:
        script.at(31, RunEnded(1, "finished"))
    with reading(tmp_path) as connection:
        (last,) = connection.execute("SELECT max(wall) FROM event").fetchone()
    assert not read_snapshot(tmp_path).history.live
    assert read_snapshot(tmp_path).heard_s == last
    killed = tmp_path / "killed"
    killed.mkdir()
    async with three_steps(killed):
        pass
    assert read_snapshot(killed).history.live
