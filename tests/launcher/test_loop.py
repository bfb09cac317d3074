"""Slots with their GPUs, and crashes, refusals and stops of runs. `laminar train` is a short program here."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from laminar_lab.curves import count_devices
from laminar_lab.launcher import loop
from laminar_lab.launcher.loop import Launcher, make_slots, module_command, wait_for_earlier_runs
from laminar_lab.launcher.progress import RunState, last_error, read_progress
from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.ledger.run_folder import new_run
from laminar_py.runtime.cluster.placement import Needs, Node, make_plan
from tests.launcher.experiments import BASE, make_experiment, program
from tests.report.builders import make_step_row, write_rows

COUNT = """
starts = Path(changes["runs"]) / "starts"
with starts.open("a") as file:
    file.write("x")
"""
FINISH = """
folder = Path(changes["runs"]) / f"{changes['name']}-1"
folder.mkdir(exist_ok=True)
(folder / "summary.json").write_text((Path(__file__).parent / "summary.json").read_text())
"""
REFUSE_FIRST = """
if changes["seed"] == "0":
    print("laminar: x=1: no")
    sys.exit(2)
"""
STOP_LAUNCHER = """
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(600)
"""
HOLD = """
import sys
from pathlib import Path
from laminar_py.ledger.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.lock()
print("locked", flush=True)
sys.stdin.read()
"""
GPUS = {"cluster.learner_device": "cuda", "learner.world_size": 8}
JUDGE = {"kind": "judge", "servers": "prm"}
SERVED = {"reward.use": [JUDGE], "reward.servers": {"prm": {"model": "/models/prm", "count": 3, "gpus": 2}}}


@pytest.fixture(autouse=True)
def _host(monkeypatch):
    """A host with 20 GPUs, and short pauses."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(20))))
    monkeypatch.setattr(loop, "BACK_OFF_S", 0.01)
    monkeypatch.setattr(loop, "LOOK_S", 0.01)


def write_summary(folder, **more):
    """A summary of a finished run, which the program copies."""
    lengths, relay = {"p50": 1, "p95": 2, "p99": 3}, {"versions": 1, "stall_s": None, "spread_s": None}
    counts = {"issued": 1, "consumed": 1, "dropped": 0, "live": 0, "dropped_by_reason": {}}
    repack = {"rounds": 0, "running": 0, "waiting": 0, "round_s": None, "prefill_max": 0}
    zeros = dict.fromkeys(
        ("rl_seconds", "trained_tokens_per_s", "overlap_share", "learner_waiting_share", "kv_use"), 0.0
    )
    summary = {"run": "r", "finished": True, "accuracy_start": None, "accuracy_end": None, "steps": 1, **zeros}
    summary |= {"response_length": lengths, "tokens": {"generated": 1, "trained": 1}, "trajectories": counts}
    summary |= {
        "staleness": {"mean": 0.0, "max": 0},
        "versions_alive_max": 1,
        "peak_memory_bytes": 1,
        "restarts": {},
    }
    summary |= {"evaluations": [], "relay": {**relay, "wire_share": None}, "repack": repack}
    summary |= {"checkpoints": {"count": 0, "stall_s": None, "elapsed_s": None}}
    summary |= {"unscored": {"count": 0, "of": 0, "first": ""}}
    (folder / "summary.json").write_text(json.dumps(summary | more))


async def launch(folder, text, *, gpus=((),), **settings):
    """Whether no signal came, the progress of all runs, the number of starts, and the lines of the launcher."""
    experiment = make_experiment(folder, **settings)
    runs = experiment.runs[0].config.runs
    runs.mkdir(exist_ok=True)
    write_summary(folder)
    lines = []
    train = program(folder, COUNT + text)
    complete = await Launcher(experiment, gpus, train=train, log=lines.append).run_all()
    starts = len((runs / "starts").read_text()) if (runs / "starts").is_file() else 0
    return complete, [read_progress(run) for run in experiment.runs], starts, lines


# ---- slots


def test_runs_side_by_side_have_gpus_of_their_own(tmp_path):
    slots = make_slots(make_experiment(tmp_path, seeds=5, set=GPUS))
    assert slots == [tuple(map(str, range(8))), tuple(map(str, range(8, 16)))]
    assert len(make_slots(make_experiment(tmp_path, seeds=1, set=GPUS))) == 1, "no more slots than runs"


def test_the_largest_variant_decides_how_many_runs_fit(tmp_path):
    experiment = make_experiment(tmp_path, grid={"learner.world_size": [2, 10]}, seeds=5, set=GPUS)
    assert [len(slot) for slot in make_slots(experiment)] == [10, 10]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"parallel": 3, "set": GPUS},
            "parallel=3: there is room for 2 at a time, each with 8 GPUs; lower it to 2",
        ),
        ({"set": GPUS | {"learner.world_size": 30}}, r"CUDA_VISIBLE_DEVICES=0,.*: a run needs 30 GPUs, and"),
        ({"parallel": 2, "set": {"cluster.address": "auto"}}, "parallel=2: runs would share one Ray cluster"),
    ],
)
def test_too_many_runs_at_a_time_are_refused(tmp_path, settings, line):
    with pytest.raises(ConfigError, match=line):
        make_slots(make_experiment(tmp_path, seeds=5, **settings))


@pytest.mark.parametrize("settings", [{}, GPUS | {"cluster.address": "auto"}])
def test_runs_without_gpus_of_this_host_or_on_a_shared_cluster_run_one_after_another(tmp_path, settings):
    assert len(make_slots(make_experiment(tmp_path, seeds=5, set=settings))) == 1


def test_runs_without_gpus_run_side_by_side_on_request(tmp_path):
    assert make_slots(make_experiment(tmp_path, seeds=5, parallel=3)) == [()] * 3


@pytest.mark.parametrize(
    "settings",
    [
        {"cluster.learner_device": "cuda", "learner.world_size": 3},
        {"cluster.learner_device": "cuda", "algorithm.kl_coef": 0.1, "algorithm.reference_pass": "stage"},
    ],
)
def test_the_gpus_of_a_run_are_those_that_its_parts_are_placed_on(tmp_path, settings):
    (run,) = make_experiment(tmp_path, set=settings | SERVED).runs
    plan = make_plan(Needs.from_config(run.config), [Node(id="a", ip="", gpus=50)])
    placed = [place.gpus for place in (*plan.learner, *plan.replicas, *plan.servers, *plan.stages) if place]
    assert run.config.gpus == sum(placed) > 6
    assert count_devices(run.config) == (run.config.gpus, "GPU")


async def test_each_run_sees_the_gpus_of_its_slot(tmp_path):
    text = "Path(changes['runs'], 'gpus').write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n" + FINISH
    await launch(tmp_path, text, gpus=[("2", "5")])
    assert (tmp_path / "runs/gpus").read_text() == "2,5"


# ---- crashes and refusals


async def test_a_refused_run_is_not_retried_and_other_runs_continue(tmp_path):
    complete, (failed, finished), starts, _ = await launch(tmp_path, REFUSE_FIRST + FINISH, seeds=2)
    assert complete
    assert (failed.state, failed.reason) == (RunState.FAILED, "x=1: no")
    assert finished.state is RunState.FINISHED
    assert starts == 2


@pytest.mark.parametrize(
    ("text", "reason", "settings"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "its process ended by SIGKILL", {}),
        ("sys.exit(2)", "its process ended with exit code 2", {"cluster.address": "auto"}),  # perhaps it is full
    ],
)
async def test_a_run_that_crashes_without_a_step_fails_after_four_tries(tmp_path, text, reason, settings):
    _, (failed,), starts, _ = await launch(tmp_path, text, set=settings)
    assert (failed.state, failed.reason) == (RunState.FAILED, reason)
    assert starts == loop.MOST_CRASHES


@pytest.mark.parametrize("code", [1, 130])
async def test_a_run_that_crashes_or_is_stopped_once_is_resumed_and_finishes(tmp_path, code):
    text = f"\nif starts.stat().st_size == 1:\n    sys.exit({code})\n" + FINISH
    _, (finished,), starts, lines = await launch(tmp_path, text)
    assert finished.state is RunState.FINISHED
    assert starts == 2
    assert any(line.startswith("e-base-s0: crashed; next try in 0.01 s: its process ended") for line in lines)


async def test_crashes_after_new_steps_do_not_add_up(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [make_step_row(1, 10.0, trained_tokens=5000)])
    row = (tmp_path / "rows.jsonl").read_text().rstrip()
    text = f"""
tries = len(starts.read_text())
folder = Path(changes["runs"]) / f"{{changes['name']}}-1"
folder.mkdir(exist_ok=True)
with (folder / "metrics.jsonl").open("a") as file:
    file.write({row!r}.replace('"step":1,', f'"step":{{tries}},') + chr(10))
if tries <= 6:
    sys.exit(1)
"""
    _, (finished,), starts, _ = await launch(tmp_path, text + FINISH)
    assert (finished.state, starts) == (RunState.FINISHED, 7)


async def test_a_run_with_unreadable_files_fails_alone(tmp_path):
    bad, worse, _ = make_experiment(tmp_path, seeds=3).runs
    folder = new_run(bad.config)
    folder.ledger.write_text("begun")
    folder.metrics.mkdir()
    (new_run(worse.config).path / "lock").mkdir()
    text = "\nif changes['seed'] < '2':\n    sys.exit(2)\n" + FINISH
    _, (failed, _, finished), _, _ = await launch(tmp_path, text, seeds=3)
    assert failed.state is RunState.FAILED
    assert "metrics.jsonl" in failed.reason
    assert finished.state is RunState.FINISHED


@pytest.mark.parametrize("left", ["checkpoints/step-3", "metrics.jsonl"])
async def test_a_run_that_has_done_something_is_resumed_though_its_ledger_is_lost(tmp_path, left):
    (run,) = make_experiment(tmp_path).runs
    folder = new_run(run.config)
    (folder.path / left).write_text("{}")
    _, (finished,), _, _ = await launch(tmp_path, "assert '--resume' in sys.argv\n" + FINISH)
    assert finished.state is RunState.FINISHED


async def test_a_run_that_has_done_nothing_is_not_resumed(tmp_path):
    (run,) = make_experiment(tmp_path).runs
    new_run(run.config).config.write_text("name: e-ba")
    _, (finished,), _, _ = await launch(tmp_path, "assert '--resume' not in sys.argv\n" + FINISH)
    assert finished.state is RunState.FINISHED


async def test_runs_start_with_the_checked_settings_though_the_base_has_changed(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(BASE.read_text())
    text = "Path(changes['runs'], 'steps-' + changes['seed']).write_text(Path(sys.argv[1]).read_text())\n"
    text += f"Path({str(base)!r}).write_text('steps: none')\n" + FINISH
    _, progress, _, _ = await launch(tmp_path, text, base=str(base), seeds=2)
    assert [one.state for one in progress] == [RunState.FINISHED] * 2
    found = [load_config(tmp_path / f"runs/steps-{seed}", []) for seed in range(2)]
    assert found == [one.run.config for one in progress]


async def test_a_finished_run_is_not_started_again_also_not_one_of_another_release(tmp_path):
    await launch(tmp_path, FINISH)
    (tmp_path / "runs/e-base-s0-1/summary.json").write_text('{"finished": true, "of": "another release"}')
    complete, (finished,), starts, _ = await launch(tmp_path, FINISH)
    assert (complete, finished.state, starts) == (True, RunState.FINISHED, 1)


# ---- other processes and stops


def hold(folder):
    """A process that has a run until its input ends."""
    command = [sys.executable, "-c", HOLD, str(folder.path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"locked\n"
    return holder


async def test_a_run_of_another_process_is_not_started_and_other_runs_continue(tmp_path):
    held, _ = make_experiment(tmp_path, seeds=2).runs
    with hold(new_run(held.config)) as holder:
        _, progress, starts, lines = await launch(tmp_path, FINISH, seeds=2)
        holder.communicate(b"")
    assert [one.state for one in progress] == [RunState.UNFINISHED, RunState.FINISHED]
    assert starts == 1
    assert any(f"process {holder.pid} on " in line and "has it; end that process" in line for line in lines)


def test_a_launcher_waits_for_runs_that_an_earlier_launcher_left(tmp_path):
    experiment = make_experiment(tmp_path)
    holder = hold(new_run(experiment.runs[0].config))
    lines = []

    def log(line):
        lines.append(line)
        holder.communicate(b"")

    wait_for_earlier_runs(experiment, log)
    assert len(lines) == 1
    assert holder.poll() == 0


async def test_a_signal_stops_the_running_run_and_starts_no_other_run(tmp_path):
    complete, progress, starts, _ = await launch(tmp_path, STOP_LAUNCHER, seeds=2)
    assert not complete
    assert starts == 1
    assert [one.state for one in progress] == [RunState.WAITING] * 2


async def test_a_run_that_a_signal_stops_during_its_imports_has_not_failed(tmp_path):
    text = "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(600)"  # SIGINT ends it with a traceback
    complete, (progress,), starts, _ = await launch(tmp_path, text)
    assert not complete
    assert (progress.state, progress.reason, starts) == (RunState.WAITING, "", 1)


@pytest.mark.parametrize(
    "line",
    ["stopped", "stopped before it began", "runs/e-1 was stopped at once; go on", "ended at once, as asked"],
)
def test_a_stopped_run_has_not_failed(tmp_path, line):
    (tmp_path / "log").write_text(f"step 3\nlaminar: {line}\n")
    assert last_error(tmp_path / "log") == ""


def test_a_guarded_process_gets_a_signal_when_its_parent_is_killed(tmp_path):
    child = program(tmp_path, "print(os.getpid(), flush=True)\ntime.sleep(600)")
    command = [*module_command("laminar_lab.launcher.guard"), "PARENT", *child, "config"]
    own = f"command = {command}; command[command.index('PARENT')] = str(os.getpid())"
    start = f"import os, subprocess; {own}; subprocess.run(command)"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True) as parent:
        guarded = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        gone, _ = psutil.wait_procs([guarded], timeout=60)
    assert gone
