"""Curves of evaluations, for those who compare runs."""

import pytest

from laminar_py.config.loading import dump_config, load_config
from laminar_py.observe.quality import read_curves
from tests.analytics.builders import make_step_row, write_rows
from tests.builders import make_evaluated
from tests.ledger.runs import begin, open_ledger
from tests.runs.runs import REPO


async def test_a_curve_has_each_set_with_its_costs_in_the_order_of_time(tmp_path):
    config = load_config(
        REPO / "configs/quickstart.yaml",
        ["eval.sets={easy: easy.jsonl, hard: hard.jsonl, rare: rare.jsonl}", "rollout.replicas=3"],
    )
    (tmp_path / "config.yaml").write_text(dump_config(config))
    write_rows(tmp_path / "metrics.jsonl", [make_step_row(1, 10.0, trained_tokens=1_000)])
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        for index, (name, mean, rl_s) in enumerate(
            [("hard", 0.25, 0.0), ("easy", 0.5, 0.0), ("easy", 1.0, 10.0), ("easy", 0.75, 5.0)]
        ):
            ledger.append(make_evaluated(mean, rl_s=rl_s, set_name=name, index=index))
    curves = read_curves(tmp_path)
    assert list(curves) == ["easy", "hard"]
    easy = curves["easy"]
    assert [(point.rl_s, point.value, point.tokens) for point in easy] == [
        (0.0, 0.5, 0),
        (5.0, 0.75, 500),
        (10.0, 1.0, 1_000),
    ]
    assert easy[2].device_hours == pytest.approx(10.0 * (3 + 1) / 3600)
    assert easy[0].figures.mean.low < 0.5 < easy[0].figures.mean.high
    assert {k: one.value for k, one in easy[0].figures.pass_at.items()} == {1: 0.5}
