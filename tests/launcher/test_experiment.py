"""Files of experiments: what they make of a grid or a list, and what they refuse in one line."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_lab.launcher.experiment import ExperimentSettings, check_existing_runs, read_experiment
from laminar_py.config.loading import load_settings, to_overrides
from laminar_py.config.section import ConfigError
from laminar_py.ledger.database import LEDGER_NAME, open_writer
from laminar_py.ledger.ledger import Ledger
from laminar_py.ledger.recovery import first_events
from laminar_py.ledger.run_folder import new_run, run_at
from laminar_py.records.host import SystemClock
from laminar_py.runtime.orchestrator.resume import record_overrides
from tests.depth import examples
from tests.launcher.experiments import make_experiment

GRID = {"learner.lr": [1e-3, 3e-3], "algorithm.name": ["grpo", "dapo"]}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def test_a_grid_is_every_combination_with_every_seed_and_first_seeds_come_first(tmp_path):
    experiment = make_experiment(tmp_path, grid=GRID, seeds=3)
    assert experiment.variants == [
        f"lr-{lr}_algorithm-{name}" for lr in (0.001, 0.003) for name in ("grpo", "dapo")
    ]
    assert [run.seed for run in experiment.runs] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({run.name for run in experiment.runs}) == 12
    last = experiment.runs[-1]
    assert (last.config.learner.lr, last.config.algorithm.name, last.config.seed) == (3e-3, "dapo", 2)
    assert last.config.runs == tmp_path / "runs"


def test_variants_of_a_list_set_their_settings_over_those_of_all(tmp_path):
    variants = [{"name": "slow", "set": {"learner.lr": 1e-4}}, {"name": "plain"}]
    experiment = make_experiment(tmp_path, set={"learner.lr": 5e-3, "steps": 7}, variants=variants, seeds=[4])
    assert [run.name for run in experiment.runs] == ["e-slow-s4", "e-plain-s4"]
    assert [run.config.learner.lr for run in experiment.runs] == [1e-4, 5e-3]


def test_an_override_of_the_same_algorithm_leaves_its_settings(tmp_path):
    """A word reaches `laminar train` unquoted: quoted, it would look like another algorithm's name."""
    (run,) = make_experiment(tmp_path, set={"algorithm.name": "grpo"}).runs
    assert run.config.algorithm.clip_high == 0.28, "of configs/quickstart.yaml"


@settings(max_examples=examples(100))
@given(VALUES)
def test_what_is_set_reaches_the_command_line_unchanged(tmp_path_factory, value):
    file = tmp_path_factory.mktemp("set") / "e.yaml"
    file.write_text("name: e\nbase: b.yaml\nset: {}")
    (override,) = to_overrides({"set.key": value})
    assert load_settings(ExperimentSettings, file, [override], help_at="").set == {"key": value}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"grid": {"learner.lrr": [1]}}, "variant lrr-1: learner.lrr=1: unknown key; did you mean learner.lr?"),
        ({"grid": {"learner.lr": [1, -1]}}, "variant lr--1: learner.lr=-1: input should be greater than 0"),
        ({"grid": {"learner.lr": []}}, "grid.learner.lr=[]: list should have at least 1 item"),
        ({"grid": {"seed": [1]}}, "grid.seed=[1]: an experiment decides that by seeds"),
        ({"grid": GRID, "variants": [{"name": "a"}]}, "grid=learner.lr, algorithm.name: variants are given too"),
        ({"variants": [{"name": "a"}, {"name": "a"}]}, "variants=a: 2 variants have this name"),
        ({"grid": {"learner.lr": [1, 1]}}, "grid=lr-1: 2 variants have this name"),
        ({"variants": [{"name": "a b"}]}, "variants.0.name='a b': string should match pattern"),
        ({"base": "nowhere.yaml"}, "base=nowhere.yaml: no such file"),
        ({"set": {"steps": "many"}}, "base="),
        ({"grid": {"data.train": ["x" * 300]}}, f"name=e-train-{'x' * 32}...: this run's name has 311 characters"),
        ({"seeds": [1, 1]}, "seeds=[1, 1]: must be different numbers"),
        ({"seeds": []}, "seeds=[]: must be different numbers"),
        ({"seeds": 20260101}, "seeds=20260101: is no number of seeds from 1 to 1000"),
        ({"seeds": -3}, "seeds=-3: is no number of seeds"),
        ({"seeds": True}, "seeds=True: is no number of seeds"),
        (
            {"set": {"rollout": {"prompts_per_step": 8}}},
            "set.rollout={'prompts_per_step': 8}: would drop rollout.batch_per_replica, which",
        ),
        ({"grid": {"learner": [{"lr": 1e-3}]}}, "grid.learner={'lr': 0.001}: would drop learner."),
        ({"seeds": "two"}, "seeds='two': input should be a valid array"),
        ({"parallel": 0}, "parallel=0: input should be greater than or equal to 1"),
        ({"seed": 1}, "seed=1: unknown key; did you mean seeds?"),
    ],
)
def test_a_mistake_is_one_line_with_field_value_and_remedy(tmp_path, given, line):
    with pytest.raises(ConfigError) as refusal:
        make_experiment(tmp_path, **given)
    told = str(refusal.value)
    assert told.startswith(line)
    assert ";" in told, "a remedy"
    assert "\n" not in told


def test_a_table_of_free_names_and_a_section_that_the_base_leaves_out_may_be_given_whole(tmp_path):
    sets = {"eval.sets": {"other": {"path": "heldout.jsonl"}}, "supervisor": {"max_restarts": 2}}
    (run,) = make_experiment(tmp_path, set=sets).runs
    assert list(run.config.eval.sets) == ["other"]


def begin(run):
    """A folder of the run, as `laminar train` begins it."""
    folder = new_run(run.config)
    open_writer(folder.ledger).close()
    return folder.path


def test_a_run_that_was_made_with_other_settings_is_not_taken_for_one_of_this_experiment(tmp_path):
    (before,) = make_experiment(tmp_path, set={"learner.lr": 1e-3}).runs
    begin(before)
    check_existing_runs(make_experiment(tmp_path, set={"learner.lr": 1e-3}))
    changed = make_experiment(tmp_path, set={"learner.lr": 2e-3})
    with pytest.raises(
        ConfigError, match=r"learner.lr=0.002: .*e-base-s0-1 was made with 0.001; set the old value"
    ):
        check_existing_runs(changed)


async def resume_by_hand(run, overrides, *, learner_starts=True):
    """Begin the run's folder, and resume it with overrides."""
    path = begin(run)
    (started, _) = first_events(run.config, incarnation=2, host="a", data={}, overrides=overrides)
    ledger = Ledger(path / LEDGER_NAME, host="a", clock=SystemClock())
    await ledger.start()
    ledger.append(started)
    await ledger.close()
    if learner_starts:
        record_overrides(run_at(path), overrides)


async def test_a_run_that_was_resumed_by_hand_goes_on_with_its_overrides(tmp_path):
    experiment = make_experiment(tmp_path, set={"learner.lr": 1e-3})
    await resume_by_hand(experiment.runs[0], ("name=e-base-s0", "steps=8", "algorithm.name=dapo"))
    line = "e-base-s0: a resume by hand changed steps=8 algorithm.name=dapo; the run continues with that"
    assert check_existing_runs(experiment) == [line]
    with pytest.raises(ConfigError, match=r"learner.lr=0.002: "):
        check_existing_runs(make_experiment(tmp_path, set={"learner.lr": 2e-3}))


async def test_a_resume_by_hand_that_ended_before_its_learner_started_changes_nothing(tmp_path):
    experiment = make_experiment(tmp_path, set={"learner.lr": 1e-3})
    await resume_by_hand(experiment.runs[0], ("learner.lr=5e-3", "steps=8"), learner_starts=False)
    assert check_existing_runs(experiment) == []
    with pytest.raises(ConfigError, match=r"learner.lr=0.002: .*was made with 0.001"):
        check_existing_runs(make_experiment(tmp_path, set={"learner.lr": 2e-3}))


def test_a_run_that_was_made_twice_is_refused(tmp_path):
    experiment = make_experiment(tmp_path)
    first, second = begin(experiment.runs[0]), begin(experiment.runs[0])
    with pytest.raises(
        ConfigError, match=rf"^e-base-s0: {second} and {first.name} are both folders of this run; move one"
    ):
        check_existing_runs(experiment)


def test_an_experiment_is_the_same_by_whichever_path_it_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = new_run(make_experiment(Path("exp")).runs[0].config)
    open_writer(folder.ledger).close()
    check_existing_runs(read_experiment(tmp_path / "exp/experiment.yaml"))


def test_a_ledger_whose_making_was_interrupted_is_none(tmp_path):
    (run,) = make_experiment(tmp_path).runs
    folder = new_run(run.config)
    folder.ledger.touch()
    assert not folder.has_ledger
    open_writer(folder.ledger).close()
    assert folder.has_ledger
