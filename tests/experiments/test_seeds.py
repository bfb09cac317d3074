"""Experiments over several seeds say the median and the range of what they compare."""

from types import SimpleNamespace

from experiments.schedules import run as schedules
from experiments.vs_trl import run as vs_trl
from experiments.vs_trl.run import Measured
from laminar_py.config.rollout import Schedule


def measured(tokens_per_s: int, *, seconds_to_target: float) -> Measured:
    return Measured([(tokens_per_s, 1.0)] * 20, [(5, 1.0, 0.5), (10, seconds_to_target, 0.95)])


def finished(tokens_per_s: float) -> SimpleNamespace:
    evaluations = [SimpleNamespace(rl_s=0.0, mean=0.1), SimpleNamespace(rl_s=29.0, mean=0.8)]
    summary = SimpleNamespace(
        trained_tokens_per_s=tokens_per_s,
        tokens=SimpleNamespace(generated=600),
        rl_seconds=60.0,
        steps=9,
        staleness=SimpleNamespace(mean=1.5),
        versions_alive_max=4,
        overlap_share=0.5,
        evaluations=[*evaluations, SimpleNamespace(rl_s=61.0, mean=0.9)],
    )
    return SimpleNamespace(summary=summary)


def test_against_trl_each_ratio_is_of_one_seed_and_stands_with_its_range():
    ours = [measured(speed, seconds_to_target=10.0) for speed in (900, 800, 700)]
    trl = [measured(100, seconds_to_target=seconds) for seconds in (90.0, 80.0, 100.0)]
    speed, time_to = vs_trl.rows_of(ours, trl, target=0.9)
    assert (speed.value, time_to.value) == (8.0, 9.0)
    assert (
        "median of 3 rounds in turn, 7.00 to 9.00; ours 800 (700 to 900), TRL 100 (100 to 100)" in speed.conditions
    )
    assert "8.00 to 10.00" in time_to.conditions
    assert all("245,000 parameters, 3 seeds" in row.conditions for row in (speed, time_to))


def test_what_trl_measured_is_read_from_its_file(tmp_path):
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '{"steps": [[13000, 1.5]], "accuracy": [[5, 5.5, 0.25]]}' > "$5"\n""")
    python.chmod(0o700)
    found = vs_trl.run_trl(python, model=tmp_path, seed=0, steps=20, target=0.9)
    assert found == Measured([(13000, 1.5)], [(5, 5.5, 0.25)])


def test_a_time_to_accuracy_needs_every_run_to_reach_it():
    late = measured(100, seconds_to_target=90.0)
    assert len(vs_trl.rows_of([late, late], [late, Measured(late.steps, [(5, 1.0, 0.5)])], target=0.9)) == 1


def test_schedules_are_compared_seed_by_seed_and_stand_with_their_ranges():
    speeds = {Schedule.SYNC: (100, 110, 120), Schedule.ONE_STEP: (100, 100, 100), Schedule.ASYNC: (150, 154, 156)}
    runs = {schedule: [finished(speed) for speed in seeds] for schedule, seeds in speeds.items()}
    found = {row.name: row for row in schedules.rows(runs, (30, 60))}
    assert found["async_over_sync"].value == 1.4
    assert "1.30 to 1.50" in found["async_over_sync"].conditions
    assert found["trained_tokens_per_s_sync"].value == 110
    assert "sync: trained_tokens_per_s 110 (100 to 120)" in found["trained_tokens_per_s_sync"].conditions
    assert (found["accuracy_30s_async"].value, found["accuracy_60s_async"].value) == (0.8, 0.9)
