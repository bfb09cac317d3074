"""Whole runs with real Ray actors, sockets, engines and a ledger: they learn, die, come back and keep the laws."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
from collections import defaultdict
from contextlib import closing, suppress
from importlib.util import find_spec

import psutil
import pytest

from laminar_lab.audit.queries import Filters, accounting, listing
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.trajectory import Kind, Status
from tests.runs.runs import ALONE, LAMINAR, REPO, TrainProcess, assert_laws, wait_until_gone


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def starts_of(run):
    """Process ids of each part, one for each time that it was started."""
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        bodies = ledger.execute("SELECT body FROM event WHERE kind = 'partstarted' ORDER BY seq").fetchall()
    starts = defaultdict(list)
    for body in (json.loads(body) for (body,) in bodies):
        starts[body["part"]].append(body["pid"])
    return starts


def kill_part(train, part):
    """The process of a part, as soon as there is one."""
    os.kill(train.wait_until(lambda: starts_of(train.run)[part])[-1], signal.SIGKILL)


def consumed(run):
    return list(listing(run, Filters(status=Status.CONSUMED, kind=Kind.TRAIN)))


def relays_that_listen(family):
    """How many there are. Law 7: all processes listen on loopback alone."""
    relays = 0
    for process in family:
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            ends = [end for end in process.net_connections("tcp") if end.status == psutil.CONN_LISTEN]
            listening = [end.laddr.ip.removeprefix("::ffff:") for end in ends]
            assert set(listening) <= {"127.0.0.1", "::1"}, f"{process.name()} listens on {listening}"
            relays += process.name().startswith("relay-") and bool(listening)
    return relays


def relays_of(train):
    """Relays that listen; none where a process of the run ended while it was looked at."""
    with suppress(psutil.NoSuchProcess):
        return relays_that_listen(train.family())


def assert_deltas_travel(run):
    """A relay gets a new version as a delta if it has the one before.

    On a busy machine it may have skipped that one, and an old version, for a deferred evaluation, comes in full.
    """
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        bodies = ledger.execute("SELECT body FROM event WHERE kind = 'relayed' ORDER BY seq").fetchall()
    shares, newest = [], defaultdict(lambda: -1)
    for event in (json.loads(body) for (body,) in bodies):
        node, version, base = event["node"], event["version"], event["base"]
        if node != "relay-0" and version > newest[node]:
            assert base == (newest[node] if newest[node] == version - 1 >= 0 else None), event
            shares += [event["wire_bytes"] / event["num_bytes"]] * (base is not None)
        newest[node] = max(version, newest[node])
    assert min(shares, default=0.0) < 0.5, shares  # not of all: a newer version ends the encoding of one


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """A run one step behind, whose versions are evaluated after its end; what is left of its processes."""
    evaluates = ("eval.every_steps=1", "eval.deferred=true", "relay.keep_versions=1")
    with TrainProcess(tmp_path_factory.mktemp("one-step"), "schedule=one_step", *evaluates) as train:
        train.wait_for_step(1)
        train.wait_until(lambda: relays_of(train) == 3)
        family = train.family()
        code, output = train.finish()
        left = wait_until_gone(family)
    assert code == 0, output
    return train.run, left


def test_a_run_ends_well_and_leaves_nothing_behind(one_step):
    run, left = one_step
    assert left == []
    assert_laws(run)
    summary = summary_of(run)
    assert summary["finished"]
    assert summary["steps"] == 4
    assert summary["tokens"]["trained"] == sum(row.length for row in consumed(run))
    assert summary["trajectories"]["consumed"] == len(consumed(run)) == 4 * 16
    assert summary["peak_memory_bytes"] < 6 << 30
    assert summary["relay"]["versions"] == 5
    assert_deltas_travel(run)


def test_every_reward_is_computed_again_from_the_record(one_step):
    run, _ = one_step
    scored = [row for row in listing(run, Filters()) if row.reward is not None]
    command = [LAMINAR, "rescore", str(run)]
    same = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert same.returncode == 0, same.stdout + same.stderr
    assert same.stdout.splitlines()[-1].startswith(f"{len(scored)} responses, p50 ")
    command.append("reward.use=[{kind: length, most: 9, weight: 5}]")
    other = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert other.returncode == 1
    assert f"{scored[0].id}: {scored[0].reward:g} on record, -" in other.stdout


def test_one_step_is_one_step_behind(one_step):
    assert {row.staleness for row in consumed(one_step[0])} == {0, 1}


def test_versions_are_held_until_their_deferred_evaluations(one_step):
    evaluations = summary_of(one_step[0])["evaluations"]
    assert [(e["step"], e["version"]) for e in evaluations] == [(i, i) for i in range(5)]


def test_dead_parts_come_back_while_the_run_goes_on_and_a_dead_run_resumes_where_the_ledger_says(tmp_path):
    tracked = [f"tracking.kinds=[{'tensorboard' if find_spec('tensorboard') else ''}]"]
    killed = ("replica-1", "relay-1", "scorer-0", "learner-0")
    with TrainProcess(tmp_path, "steps=10000", *tracked) as train:
        for step, part in enumerate(killed, start=1):
            train.wait_for_step(step)
            kill_part(train, part)
        train.wait_until(lambda: all(len(starts_of(train.run)[part]) > 1 for part in killed))
        train.wait_for_step(6)
        family = train.family()
        family[0].kill()
        train.process.wait()
        assert accounting(train.run).balanced
    steps = len((train.run / "metrics.jsonl").read_text().splitlines()) + 3
    with TrainProcess(tmp_path, f"steps={steps}", *tracked, resume=True) as again:
        again.end_with(0)
        assert wait_until_gone(family) == []
    summary = summary_of(again.run)
    assert summary["steps"] == steps
    assert [e["step"] for e in summary["evaluations"]][-1] == steps
    assert summary["tokens"]["trained"] == sum(row.length for row in consumed(again.run))
    assert_laws(again.run)
    if find_spec("tensorboard"):
        assert_tracked(again.run, steps=steps)


def assert_tracked(run, *, steps):
    """No step twice, each as metrics.jsonl has it last. What was queued when the controller was killed is lost."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = {row["step"]: row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
    found = EventAccumulator(str(run / "tensorboard")).Reload()
    entropies = [(event.step, event.value) for event in found.Scalars("tokens/entropy")]
    assert len(dict(entropies)) == len(entropies)
    assert dict(entropies) == pytest.approx({step: rows[step]["entropy"] for step, _ in entropies})
    assert {steps - 1, steps} <= set(dict(entropies)), "which came after the resume"
    assert found.Scalars("eval/heldout/mean")[-1].step == steps
    assert [event.value for event in found.Scalars("summary/steps")] == [steps]


def test_a_second_controller_on_a_run_is_refused(tmp_path):
    first = RunFolder(tmp_path / "small-1")
    first.path.mkdir()
    shutil.copyfile(REPO / "configs/quickstart.yaml", first.path / "config.yaml")
    first.lock()
    with TrainProcess(tmp_path, resume=True) as second:
        output = second.end_with(2)
    assert f"run={first.path}: another process runs it" in output


def rows_learned_as_drawn(run):
    """Rows of metrics, of which tokens without staleness have the probabilities that the engine gave them."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    fresh = [row["by_staleness"]["0"] for row in rows if "0" in row["by_staleness"]]
    assert fresh, "the first step is on policy"
    assert max(row["mismatch_max"] or 0.0 for row in rows) < 1e-3
    assert max(abs(bucket["effective_share"] - 1) for bucket in fresh) < 1e-4
    return rows


def test_a_reference_stage_refers_what_is_finished_and_loses_nothing_by_its_death_or_a_resume(tmp_path):
    """Also over a cut vocabulary, with a recomputed proximal policy and activations that are computed again."""
    cut = ["rollout.sampling.top_p=0.8", "rollout.record=[sampling_mask]"]
    (tmp_path / "reward.py").write_text("def score(request): return float(len(request.response_ids) % 3)")
    rewarded = f"reward.use=[{tmp_path / 'reward.py'}:score]"
    learns = ["algorithm.name=decoupled_ppo", "algorithm.kl_coef=0.1", "learner.recompute=all"]
    refers = [*learns, "algorithm.reference_pass=stage", rewarded, *cut, *ALONE]
    with TrainProcess(tmp_path, "steps=10000", *refers) as train:
        train.wait_for_step(2)
        kill_part(train, "reference-0")
        train.wait_for_step(5)
        train.send(signal.SIGINT)
        assert train.finish()[0] == 130
    assert summary_of(train.run)["restarts"]["reference-0"] == 1
    steps = summary_of(train.run)["steps"] + 2
    with TrainProcess(tmp_path, f"steps={steps}", *refers, resume=True) as train:
        train.end_with(0)
    assert_laws(train.run)
    rows = rows_learned_as_drawn(train.run)
    assert rows[0]["kl_reference_k3"] < 1e-6, "the first step's policy is the reference, over the same vocabulary"
    assert rows[-1]["kl_reference_k3"] > 1e-4, "the last one's is not"
    busy = [row["reference_busy_s"] for row in rows]
    assert busy[0] > 0
    assert sorted(busy) == busy


def test_steps_without_a_finite_gradient_change_nothing_and_end_the_run_by_name(tmp_path):
    (tmp_path / "reward.py").write_text("def score(request): return 9e29 * (len(request.response_ids) % 2)")
    unbounded = ["algorithm.advantage=group_mean", f"reward.use=[{tmp_path / 'reward.py'}:score]", "steps=9"]
    with TrainProcess(tmp_path, *ALONE, *unbounded) as train:
        output = train.end_with(1)
    assert "the loss or gradient was not finite in 3 steps in a row, up to step 3" in output
    assert_laws(train.run)
    with closing(sqlite3.connect(train.run / "ledger.sqlite")) as ledger:
        (skipped,) = ledger.execute("SELECT count(*) FROM event WHERE kind = 'stepskipped'").fetchone()
        digests = ledger.execute("SELECT DISTINCT digest FROM version").fetchall()
    assert (skipped, len(digests)) == (3, 1)
