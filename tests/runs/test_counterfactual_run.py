"""A whole emulated run with a deadline for groups, whose drops go on counterfactually."""

from laminar_py.ledger.audit.verify import verify
from laminar_py.observe.report import read_report
from tests.runs.runs import TrainProcess
from tests.runs.test_emulated_run import CONFIG, SETTINGS


def test_what_a_deadline_drops_is_scored_all_the_same_and_the_report_says_what_dropping_costs(tmp_path):
    deadline = ("steps=2", "rollout.group_deadline_s=0.3", "rollout.counterfactual_share=1.0")
    with TrainProcess(tmp_path, *SETTINGS, *deadline, config=CONFIG) as train:
        code, output = train.finish()
    assert code == 0, output
    report = read_report(train.run)
    (row,) = (row for row in report.drops.rows if row.reason == "group_deadline")
    assert 0 < row.known <= row.count
    assert report.tokens.counterfactual > 0
    assert row.length > report.drops.kept.length, "a deadline drops the longest"
    assert verify(train.run) == []
