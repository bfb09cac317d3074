"""A run whose fleet and settings change while it goes on: emulated replicas, and all else the real thing."""

import json
import os
import signal
import subprocess
import time

import pytest

from laminar_py.ledger.database import reading
from laminar_py.ledger.rows import decode_event
from tests.runs.runs import LAMINAR, REPO, TrainProcess, assert_laws
from tests.runs.test_train import starts_of

CONFIG = REPO / "configs/emulation/repack.yaml"
SETTINGS = (
    "warm_start=null",  # of the small settings, which are for the quickstart
    "eval.sets={}",
    "steps=10000",
    "rollout.replicas=2",
    "rollout.max_batch=8",
    "rollout.batch_per_replica=16",
    "rollout.prompts_per_step=8",  # 32 trajectories: the batches of two replicas
    "rollout.max_len=1424",
    "rollout.sampling.max_new_tokens=1024",
    "rollout.partial_interval_s=0.5",
    "rollout.engine.median_tokens=300",
    "rollout.engine.sigma=0.3",  # a long tail would leave replicas half empty, however many there are
    "rollout.engine.compression=4",
    "rollout.engine.learner_devices=64",  # generation bounds the run
    "learner.checkpoint_every=1000",
)
FOLLOWS_S = 10.0  # of an engine's being ready
SETTLED_S = 2.0  # of that, before which no token of a new engine is told
LIKE = 0.3  # rates of replicas that have as much to do differ by less


def scale(run, replicas, code=0):
    """Words of `laminar scale`."""
    return call("scale", run, replicas, code=code)


def call(command, run, *arguments, code=0):
    """Words of a command about a run."""
    done = subprocess.run(
        [LAMINAR, command, str(run), *map(str, arguments)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def events_of(run, *kinds):
    """Seconds since 1970 and event, of these kinds."""
    marks = ", ".join("?" * len(kinds))
    with reading(run) as connection:
        rows = connection.execute(f"SELECT wall, body FROM event WHERE kind IN ({marks}) ORDER BY seq", kinds)
        return [(wall, decode_event(body)) for wall, body in rows]


def fleet_of(run):
    return [json.loads(line) for line in (run / "fleet.jsonl").read_text().splitlines() if line.endswith("}")]


def left(run):
    return {event.replica for _, event in events_of(run, "replicaleft")}


def serving(run):
    """Replicas that have served a version since they started last."""
    return {event.replica for _, event in events_of(run, "versionloaded")}


def rate_from_now(run, seconds):
    """Generated tokens a second of the seconds that follow, and replicas by then."""
    first = fleet_of(run)[-1]
    time.sleep(seconds)
    last = fleet_of(run)[-1]
    tokens = last["generated_tokens"] - first["generated_tokens"]
    return tokens / (last["rl_s"] - first["rl_s"]), len(last["replicas"])


@pytest.mark.slow
def test_a_run_goes_on_with_more_replicas_and_with_fewer_and_its_rate_follows(tmp_path):
    with TrainProcess(tmp_path, *SETTINGS, config=CONFIG) as train:
        train.wait_for_step(2)
        rates = [rate_from_now(train.run, FOLLOWS_S)]
        scale(train.run, 6)
        train.wait_until(lambda: serving(train.run) == set(range(6)))
        time.sleep(SETTLED_S)
        rates.append(rate_from_now(train.run, FOLLOWS_S - SETTLED_S))
        scale(train.run, 3)
        train.wait_until(lambda: len(left(train.run)) == 3)
        time.sleep(SETTLED_S)
        rates.append(rate_from_now(train.run, FOLLOWS_S - SETTLED_S))
        train.send(signal.SIGINT)
        train.end_with(130)
    assert_laws(train.run)
    assert not events_of(train.run, "partcrashed")
    starts = [event.part for _, event in events_of(train.run, "partstarted") if "replica" in event.part]
    assert sorted(starts) == [f"replica-{index}" for index in range(6)], "nobody stopped for it"
    assert [count for _, count in rates] == [2, 6, 3]
    each = [rate / count for rate, count in rates]
    assert max(each) < (1 + LIKE) * min(each), rates


def last_step(run):
    return int(json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"])


def learners(run):
    """Names of the learner's processes, as they started."""
    return [event.part for _, event in events_of(run, "partstarted") if "learner" in event.part]


@pytest.mark.slow
def test_a_learner_goes_on_with_more_ranks_and_with_fewer_and_a_resume_keeps_them(tmp_path):
    with TrainProcess(tmp_path, "steps=10000", "eval.sets={}", "learner.checkpoint_every=1000") as train:
        train.wait_for_step(3)
        call("set", train.run, "learner.world_size=2")
        train.wait_until(lambda: "learner-1" in learners(train.run))
        grown = last_step(train.run)
        train.wait_for_step(grown + 4)
        call("set", train.run, "learner.world_size=1")
        train.wait_until(lambda: learners(train.run).count("learner-0") == 3)
        train.wait_for_step(last_step(train.run) + 2)
        call("set", train.run, "learner.world_size=2")
        train.wait_until(lambda: learners(train.run).count("learner-1") == 2)
        os.kill(starts_of(train.run)["learner-1"][-1], signal.SIGKILL)  # before a step, or in one
        train.wait_for_step(last_step(train.run) + 3)
        train.send(signal.SIGINT)
        output = train.end_with(130)
    assert "the learner goes from 1 to 2 ranks" in output
    assert "the learner goes from 2 to 1 rank\n" in output
    assert len(events_of(train.run, "partcrashed")) == 1
    before = learners(train.run).count("learner-1")
    last = last_step(train.run)
    with TrainProcess(tmp_path, f"steps={last + 3}", small=(), resume=True) as train:
        train.end_with(0)
    assert learners(train.run).count("learner-1") == before + 1
    assert_laws(train.run)


def resume(tmp_path, *settings):
    """A run that goes on with these settings and its own; its exit code is 0."""
    with TrainProcess(tmp_path, *settings, config=CONFIG, small=(), resume=True) as train:
        train.end_with(0)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_a_run_resumes_on_more_and_on_fewer_replicas_than_it_had(tmp_path, before, after):
    with TrainProcess(tmp_path, *SETTINGS, f"rollout.replicas={before}", config=CONFIG) as train:
        train.wait_for_step(2)
        train.send(signal.SIGINT)
        train.end_with(130)
    resume(tmp_path, f"rollout.replicas={after}", "steps=6")
    assert_laws(train.run)
    fleets = [event.replicas for _, event in events_of(train.run, "scaled")]
    assert fleets == [tuple(range(before)), tuple(range(after))]


def test_a_run_that_was_changed_and_killed_resumes_with_the_fleet_and_the_settings_that_it_was_to_have(tmp_path):
    with TrainProcess(tmp_path, *SETTINGS, "staleness.max_staleness=4", config=CONFIG) as train:
        train.wait_for_step(1)
        assert scale(train.run, 1, code=2).startswith(
            "laminar: rollout.replicas=1: a learner step takes 32 new traj"
        )
        scale(train.run, 3)
        train.wait_until(lambda: len(events_of(train.run, "scaled")) == 2)
        assert "resume it with learner.lr=1" in call("set", train.run, "learner.lr=1", code=2)
        call("set", train.run, "staleness.max_staleness=2", "buffer.capacity=400")
        train.wait_until(lambda: len(events_of(train.run, "settingchanged")) == 2)
        train.send(signal.SIGKILL)
    assert "--resume rollout.replicas=4" in scale(train.run, 4, code=2)
    resume(tmp_path, "steps=4")
    assert_laws(train.run)
    assert [event.replicas for _, event in events_of(train.run, "scaled")][-1] == (0, 1, 2)
    bounds = [event.max_staleness for _, event in events_of(train.run, "runstarted")]
    assert bounds == [4, 2], "the resume has the bound on record"
    assert "max_staleness: 4" in (train.run / "config.yaml").read_text(), "it is as its user wrote it"
    assert "staleness.max_staleness=2 by user" in call("audit", train.run)


@pytest.mark.slow
def test_a_run_whose_learner_waits_for_admission_widens_its_bound_by_itself(tmp_path):
    tight = ("staleness.max_staleness=1", "staleness.control={max: 3, window: 2}", "steps=24")
    held = ("rollout.batch_per_replica=64", "rollout.max_batch=64")  # the bound alone holds groups back
    with TrainProcess(tmp_path, *SETTINGS, *held, *tight, config=CONFIG) as train:
        output = train.end_with(0)
    assert_laws(train.run)
    changed = [event for _, event in events_of(train.run, "settingchanged")]
    assert changed[0].value == 2, output
    assert {event.by for event in changed} == {"control"}
    assert all(1 <= event.value <= 3 for event in changed)


@pytest.mark.slow
def test_where_versions_mix_what_a_leaving_replica_has_goes_on_at_any_other(tmp_path):
    mixing = ("rollout.on_new_weights=resume", "repack.planner=none", "rollout.replicas=3")
    with TrainProcess(tmp_path, *SETTINGS, *mixing, config=CONFIG) as train:
        train.wait_for_step(1)
        train.wait_until(lambda: all(fleet_of(train.run)[-1]["running"]))
        scale(train.run, 2)
        train.wait_until(lambda: left(train.run))
        train.wait_for_step(len((train.run / "metrics.jsonl").read_bytes().splitlines()) + 2)
        train.send(signal.SIGINT)
        train.end_with(130)
    assert_laws(train.run)
    ((left_s, _),) = events_of(train.run, "replicaleft")
    handed_back = [at_s for at_s, event in events_of(train.run, "interrupted") if event.reason == "returned"]
    assert min(handed_back) <= left_s, "it had something"
    assert not events_of(train.run, "dropped")
