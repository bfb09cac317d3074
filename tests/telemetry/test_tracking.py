"""Names under which trackers are told the numbers and settings of a run."""

import re

import msgspec

from laminar_py.observe.trackers import flat_evaluation, flat_row, flat_settings
from laminar_py.records.metrics import StepRow, TokenMetrics
from tests.builders import make_evaluated
from tests.runs.runs import REPO
from tests.telemetry.rows import make_row


def test_every_metric_has_a_name_that_all_trackers_take_and_is_documented():
    row = flat_row(make_row(1))
    assert all(re.fullmatch(r"[\w\-. :/]+", name) for name in row)
    assert row["tokens/ratio_max"] == row["staleness_9_up/ratio_max"] == 3.0
    assert row["run/mismatch_p99"] == 0.2
    documented = set(re.findall(r"`(\w+)`", (REPO / "docs/metrics.md").read_text()))
    assert set(StepRow.__struct_fields__) | set(TokenMetrics.__struct_fields__) <= documented


def test_what_a_cpu_cannot_say_is_left_out():
    row = msgspec.structs.replace(make_row(1), mfu=None)
    assert "run/mfu" not in flat_row(row)


def test_the_mean_of_a_set_has_one_name_whatever_its_rewards_are():
    known = [flat_evaluation(make_evaluated(mean)) for mean in (0.0, 0.5)]
    bonus = make_evaluated(0.5)
    known.append(flat_evaluation(msgspec.structs.replace(bonus, figures=bonus.figures.graded)))
    assert [row["eval/heldout/mean"] for row in known] == [0.0, 0.5, 0.5]
    assert {name for row in known for name in row} == set(known[-1])


def test_settings_have_dotted_names_and_no_nulls():
    tree = {"lr": 1e-6, "eval": {"at_seconds": [1.0, 2.0], "every": None}, "urls": [], "name": "a"}
    assert flat_settings(tree) == {"lr": 1e-6, "eval.at_seconds": "[1.0, 2.0]", "urls": "[]", "name": "a"}
