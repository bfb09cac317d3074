"""Trackers with their real packages, offline: what is logged is read back from what they wrote."""

import importlib.util
import json
import re
import struct
import sys

import msgspec
import pytest

from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.config.tracking import TRACKERS, Opening
from laminar_py.observe.trackers import (
    Ending,
    Rewound,
    Values,
    flat_evaluation,
    flat_row,
    flat_settings,
)
from laminar_py.records.evaluations import set_figures
from laminar_py.records.metrics import CriticFigures, StepRow, TokenMetrics, TurnFigures
from laminar_py.runtime.preflight.inputs import check_inputs
from tests.builders import make_answers, make_evaluated
from tests.runs.runs import REPO
from tests.telemetry.rows import make_row

SUMMARY = {"summary/finished": 1.0, "summary/rl_seconds": 60.0}
BLOCK = 32768  # of wandb's files: records of LevelDB's log format after a header


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def open_tracker(folder, kind):
    opening = Opening(
        kind=kind,
        folder=str(folder),
        name="math-1",
        project="math",
        settings={"learner.lr": 1e-6, "seed": 0, "data.train": "t.jsonl"},
    )
    return TRACKERS.get(kind).open(opening)


def tell(tracker, *messages):
    for message in messages:
        match message:
            case Values(step, values):
                tracker.log(step, values)
            case Rewound(step):
                tracker.undo(step)
            case Ending(summary):
                tracker.close(summary)


def incarnation(folder, kind, *messages):
    """A tracker from its start to the end of these messages; closed as a failed run's, unless they do."""
    tracker = open_tracker(folder, kind)
    tell(tracker, *messages)
    if not isinstance(messages[-1], Ending):
        tracker.close(None)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def entropies(*steps, shift=0.0):
    return [Values(step, {"tokens/entropy": step + shift, "staleness_9_up/ratio": 1.0}) for step in steps]


def a_run_that_is_rolled_back_and_resumed(folder, kind):
    """Steps 1 to 4, back to 2, 3 to 5, failed; back to 3, 4 to 6, with evaluations that come late."""
    folder.mkdir()
    again = entropies(3, 4, 5, shift=0.25)
    late = Values(2, {"eval/accuracy": 0.5})
    incarnation(folder, kind, *entropies(1, 2, 3, 4), Rewound(2), *again)
    incarnation(folder, kind, Rewound(3), *entropies(4, 5, 6, shift=0.5), late, Ending(SUMMARY))


TRUE_STEPS = [(1, 1.0), (2, 2.0), (3, 3.25), (4, 4.5), (5, 5.5), (6, 6.5)]


@needs("tensorboard")
def test_tensorboard_reads_each_step_as_it_was_made_last(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as ForPlugins
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    folder = tmp_path / "math-1"
    a_run_that_is_rolled_back_and_resumed(folder, "tensorboard")
    found = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("tokens/entropy")] == TRUE_STEPS
    assert [(event.step, event.value) for event in found.Scalars("eval/accuracy")] == [(2, 0.5)]
    assert [(event.step, event.value) for event in found.Scalars("summary/rl_seconds")] == [(6, 60.0)]
    served = ForPlugins(str(folder / "tensorboard")).Reload()  # as the program itself reads
    assert [event.step for event in served.Tensors("tokens/entropy")] == [1, 2, 3, 4, 5, 6]
    (content,) = served.PluginTagToContent("hparams").values()
    settings = HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["learner.lr"].number_value == 1e-6
    assert settings["data.train"].string_value == "t.jsonl"


@pytest.mark.slow
@needs("mlflow")
def test_mlflow_goes_on_with_its_run_and_the_newest_point_of_a_step_counts(tmp_path):
    from mlflow import MlflowClient

    a_run_that_is_rolled_back_and_resumed(tmp_path / "math-1", "mlflow")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("math").experiment_id])
    assert (run.info.run_name, run.info.status) == ("math-1", "FINISHED")
    assert run.data.params == {"learner.lr": "1e-06", "seed": "0", "data.train": "t.jsonl"}
    points = client.get_metric_history(run.info.run_id, "tokens/entropy")
    assert sorted({point.step: point.value for point in points}.items()) == TRUE_STEPS
    assert len(points) == 10, "what was undone is still there, and older"
    undone = [int(point.value) for point in client.get_metric_history(run.info.run_id, "run/continued_from")]
    assert undone == [2, 3]
    assert run.data.metrics["tokens/entropy"] == 6.5
    assert run.data.metrics["summary/rl_seconds"] == 60


@needs("mlflow")
def test_an_mlflow_run_that_was_killed_with_its_tracker_ends_once_it_is_resumed(tmp_path):
    from mlflow import MlflowClient

    folder = tmp_path / "math-1"
    folder.mkdir()
    tell(open_tracker(folder, "mlflow"), *entropies(1))
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    place = [client.get_experiment_by_name("math").experiment_id]
    assert [run.info.status for run in client.search_runs(place)] == ["RUNNING"]
    incarnation(folder, "mlflow", Rewound(0), *entropies(1), Ending(SUMMARY))
    assert [run.info.status for run in client.search_runs(place)] == ["FINISHED"]


@needs("wandb")
def test_wandb_goes_on_with_its_run_and_the_newest_row_of_a_step_counts(tmp_path):
    from wandb.proto.wandb_internal_pb2 import Record

    folder = tmp_path / "math-1"
    a_run_that_is_rolled_back_and_resumed(folder, "wandb")
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert {path.name for path in files} == {f"run-{(folder / 'wandb.id').read_text()}.wandb"}
    assert len(files) == 2, "one for each incarnation, uploaded as one run"
    records = [Record.FromString(data) for path in files for data in wandb_records(path.read_bytes())]
    rows = [history_row(one.history) for one in records if one.HasField("history")]
    points = [(row["step"], row["tokens/entropy"]) for row in rows if "tokens/entropy" in row]
    assert sorted(dict(points).items()) == TRUE_STEPS
    assert [row["run/continued_from"] for row in rows if "run/continued_from" in row] == [2, 3]
    assert [row["eval/accuracy"] for row in rows if row["step"] == 2 and "eval/accuracy" in row] == [0.5]
    started = next(one.run for one in records if one.HasField("run"))
    assert (started.project, started.display_name) == ("math", "math-1")
    assert {"learner.lr", "seed", "data.train"} <= {item.key for item in started.config.update}


def history_row(history):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}


def wandb_records(data):
    """Whole records: type 1, or pieces of type 2, 3... up to 4."""
    place, pieces = 7, b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
        _, length, kind = struct.unpack_from("<IHB", data, place)
        pieces += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield pieces
            pieces = b""


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"tracking.kinds=mlflow: .*; pip install mlflow-skinny sqlalchemy alembic"
    ):
        TRACKERS.get("mlflow").check()


def test_it_is_refused_before_anything_is_prepared(tmp_path, monkeypatch):
    (tmp_path / "prepare.py").write_text("raise SystemExit('begun')")
    changes = ["tracking.kinds=[wandb]", f"data.prepare={tmp_path / 'prepare.py'}"]
    config = load_config(REPO / "configs/quickstart.yaml", changes)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tracking.kinds=wandb: .*; pip install wandb, or"):
        check_inputs(config)


def test_a_folder_of_that_name_is_no_package(tmp_path, monkeypatch):
    kind = TRACKERS.get("wandb")
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match=r"tracking.kinds=wandb: the package wandb is not installed"):
        kind.check()


def test_an_unknown_tracker_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"tracking.kinds=visdom: unknown; choose one of mlflow, tensorboard, wandb"
    ):
        load_config(REPO / "configs/quickstart.yaml", ["tracking.kinds=[visdom]"])


def test_every_metric_has_a_name_that_all_trackers_take_and_is_documented():
    row = flat_row(make_row(1))
    assert all(re.fullmatch(r"[\w\-. :/]+", name) for name in row)
    assert row["tokens/ratio_max"] == row["staleness_9_up/ratio_max"] == 3.0
    assert row["run/mismatch_p99"] == 0.2
    documented = set(re.findall(r"`(\w+)`", (REPO / "docs/metrics.md").read_text()))
    assert set(StepRow.__struct_fields__) | set(TokenMetrics.__struct_fields__) <= documented


def test_a_function_is_named_without_its_file_unless_two_have_one_name():
    terms = {"/home/me/reward.py:score": 0.5, "math": 1.0, "a.py:bonus": 0.1, "/tmp/b.py:bonus": 0.2}
    row = msgspec.structs.replace(make_row(1), reward_terms=terms)
    told = {name: value for name, value in flat_row(row).items() if name.startswith("reward/")}
    assert told == {"reward/score": 0.5, "reward/math": 1.0, "reward/a.py:bonus": 0.1, "reward/b.py:bonus": 0.2}


def test_the_terms_of_an_evaluation_have_names_below_their_set():
    right = [[1.0, 0.0], [0.0, 0.0]]
    figures = set_figures(
        make_answers(right, terms={"math": right, "b.py:short": right}), samples=2, verdicts=["math"]
    )
    told = flat_evaluation(msgspec.structs.replace(make_evaluated(), figures=figures))
    assert (told["eval/heldout/reward/math"], told["eval/heldout/reward/math_pass_at_2"]) == (0.25, 0.5)
    assert told["eval/heldout/reward/short"] == 0.25


def test_the_names_that_people_know_are_these():
    """The table of docs/metrics.md names figures that a row has."""
    page = (REPO / "docs/metrics.md").read_text()
    table = page.partition("## Names in TRL and verl")[2].partition("\n## ")[0]
    ours = re.findall(r"^\| `([\w/<>]+)`", table, flags=re.MULTILINE)
    row = msgspec.structs.replace(make_row(1), reward_terms={"<term>": 0.5}, turns=TurnFigures(mean=2.0))
    row = msgspec.structs.replace(
        row,
        reward=0.5,
        length_p50=9,
        reward_std=0.1,
        frac_reward_zero_std=0.1,
        clipped_ratio=0.1,
        learning_rate=1e-6,
    )
    assert len(ours) > 12
    assert [name for name in ours if name not in flat_row(row) and not name.startswith("eval/")] == []


def test_a_critic_has_figures_of_its_own():
    valued = flat_row(msgspec.structs.replace(make_row(1), critic=CriticFigures(value_loss=0.25, skipped=1)))
    assert (valued["critic/value_loss"], valued["critic/skipped"]) == (0.25, 1)
    assert "critic/value_mean" not in valued, "it was not measured"
    assert not any(name.startswith("critic") for name in flat_row(make_row(1)))
    documented = set(re.findall(r"`(\w+)`", (REPO / "docs/metrics.md").read_text()))
    assert set(CriticFigures.__struct_fields__) <= documented


def test_what_a_cpu_cannot_say_is_left_out():
    row = msgspec.structs.replace(make_row(1), mfu=None)
    assert "run/mfu" not in flat_row(row)


def test_the_mean_of_a_set_has_one_name_whatever_its_rewards_are():
    known = [flat_evaluation(make_evaluated(mean)) for mean in (0.0, 0.5)]
    bonus = make_evaluated(0.5)
    means = msgspec.structs.replace(bonus.figures, is_accuracy=False, pass_at={})
    known.append(flat_evaluation(msgspec.structs.replace(bonus, figures=means)))
    assert [row["eval/heldout/mean"] for row in known] == [0.0, 0.5, 0.5]
    assert {name for row in known for name in row} == set(known[-1])


def test_settings_have_dotted_names_and_no_nulls():
    tree = {"lr": 1e-6, "eval": {"at_seconds": [1.0, 2.0], "every": None}, "urls": [], "name": "a"}
    assert flat_settings(tree) == {"lr": 1e-6, "eval.at_seconds": "[1.0, 2.0]", "urls": "[]", "name": "a"}
