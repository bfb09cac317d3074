"""Whole runs with rounded weights: they learn and verify; beyond the bound they go back, for good."""

import json

import pytest

from laminar_lab.audit.verify import verify
from laminar_py.ledger import read_events, reading
from laminar_py.ledger.requests import rounding_on_record
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.events import Alarmed, Unquantized, VersionLoaded
from tests.runs.runs import TrainProcess, forget_versions

pytestmark = pytest.mark.slow
FP8 = ("rollout.engine.quantization=fp8", "eval.sets={}", "staleness.max_staleness=1")


def events(run, kind):
    with reading(run) as connection:
        return list(read_events(connection, kind))


def finish(train):
    code, output = train.finish()
    assert code == 0, output
    assert not events(train.run, Alarmed)
    return output


def test_a_run_with_rounded_weights_has_its_mismatch_and_both_digests_on_record(tmp_path):
    with TrainProcess(tmp_path, *FP8, "learner.lr=1e-3") as train:
        finish(train)
    gaps = [row["mismatch_mean"] for row in map(json.loads, (train.run / "metrics.jsonl").open())]
    assert any(gap and 1e-4 < gap < 0.1 for gap in gaps)
    assert not events(train.run, Unquantized)
    loads = events(train.run, VersionLoaded)
    assert all(load.quantized and load.base is None for load in loads)
    pairs = {(load.version, load.digest, load.checksum) for load in loads}
    assert len(pairs) == len({version for version, _, _ in pairs}) > 2, "a digest has one checksum"
    assert verify(train.run) == []
    assert "correction: sequence_mask" in (train.run / "config.yaml").read_text()
    forget_versions(train.run)


def test_engines_and_a_learner_that_round_alike_agree_and_a_mismatch_ends_the_run(tmp_path):
    rounds = (*FP8, "learner.rounds_weights=true", "learner.lr=1e-3")
    with TrainProcess(tmp_path, *rounds) as train:
        finish(train)
    gaps = [row["mismatch_mean"] for row in map(json.loads, (train.run / "metrics.jsonl").open())]
    assert any(gap is not None for gap in gaps)
    assert max(filter(None, gaps), default=0.0) < 1e-4
    assert verify(train.run) == []
    with TrainProcess(tmp_path, *rounds, "rollout.engine.max_mismatch=1e-12", "steps=9", resume=True) as train:
        output = train.end_with(1)
    assert "resume with rollout.engine.quantization=none learner.rounds_weights=false" in " ".join(output.split())
    assert not events(train.run, Unquantized)
    with TrainProcess(
        tmp_path, "rollout.engine.quantization=none", "learner.rounds_weights=false", "steps=9", resume=True
    ) as train:
        train.end_with(0)
    forget_versions(train.run)


def test_beyond_the_bound_all_replicas_go_back_to_published_weights_and_a_resume_keeps_that(tmp_path):
    with TrainProcess(tmp_path, *FP8, "rollout.engine.max_mismatch=1e-6") as train:
        output = finish(train)
    [event] = events(train.run, Unquantized)
    assert event.step <= 2
    assert event.describe() in " ".join(output.split())
    before = events(train.run, VersionLoaded)
    back = next(number for number, load in enumerate(before) if not load.quantized)
    assert not any(load.quantized for load in before[back:])
    assert {load.replica for load in before[back:]} == {0, 1}
    folder = RunFolder(train.run)
    assert not rounding_on_record(folder, ["rollout.engine.max_mismatch=1.0"]), "a bound above the mismatch"
    with TrainProcess(tmp_path, *FP8, "steps=6", resume=True) as train:
        finish(train)
    assert len(events(train.run, Unquantized)) == 1
    assert not any(load.quantized for load in events(train.run, VersionLoaded)[len(before) :])
    assert verify(train.run) == []
    forget_versions(train.run)
