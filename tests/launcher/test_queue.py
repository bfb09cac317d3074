"""What becomes of processes that fail, hang on to a run, or are left alone. `laminar train` is a short program."""

import asyncio
import gc
import io
import json
import os
import signal
import subprocess
import sys
import warnings

import psutil
import pytest
from rich.console import Console

from laminar_lab.launcher import queue
from laminar_lab.launcher.board import Board
from laminar_lab.launcher.plan import Slot
from laminar_lab.launcher.queue import Queue, RunProcess, held_gpus, python
from laminar_lab.launcher.standing import RunState, last_words, read_standing
from laminar_py.config.loading import load_config
from laminar_py.ledger.run_folder import new_run
from tests.launcher.experiments import BASE, make_experiment, program

COUNT = """
starts = Path(changes["runs"]) / "starts"
with starts.open("a") as file:
    file.write("x")
"""
FINISH = """
import json
folder = Path(changes["runs"]) / f"{changes['name']}-1"
folder.mkdir(exist_ok=True)
(folder / "summary.json").write_text((Path(__file__).parent / "summary.json").read_text())
"""
REFUSE_FIRST = """
if changes["seed"] == "0":
    print("laminar: x=1: no")
    sys.exit(2)
"""
PLACE = """
folder = Path(changes["runs"]) / f"{changes['name']}-1"
folder.mkdir()
(folder / "placed").touch()
while len(starts.read_text()) < 2:  # the other starts before this one has done anything else
    time.sleep(0.01)
"""
PLACE_ONE = """
folder = Path(changes["runs"]) / f"{changes['name']}-1"
folder.mkdir(exist_ok=True)
(folder / "placed").touch()
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
ASK_TO_STOP = """
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(queue, "BACK_OFF_S", 0.01)


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


def hold(folder, *, gpus):
    """A process that has a run, and sees these GPUs, until its input ends."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)],
        env=environment | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"locked\n"
    return holder


async def work(folder, text, *, gpus=((),), **settings):
    """Standings after a queue with a slot for each of `gpus` has done its work; the number of starts."""
    experiment = make_experiment(folder, **settings)
    runs = experiment.runs[0].config.runs
    runs.mkdir(exist_ok=True)
    write_summary(folder)
    board = Board(experiment, Console(file=(folder / "out").open("w")), slots=len(gpus))
    slots = [Slot(index, each) for index, each in enumerate(gpus)]
    done = await Queue(experiment, slots, train=program(folder, COUNT + text), board=board).work()
    starts = runs / "starts"
    return (
        done,
        [read_standing(run) for run in experiment.runs],
        len(starts.read_text()) if starts.is_file() else 0,
    )


async def test_a_run_that_its_config_fails_is_not_tried_again_and_others_go_on(tmp_path):
    done, (failed, finished), starts = await work(tmp_path, REFUSE_FIRST + FINISH, seeds=2)
    assert done
    assert (failed.state, failed.why) == (RunState.FAILED, "x=1: no")
    assert finished.state is RunState.FINISHED
    assert starts == 2


def let_in(monkeypatch, *rooms):
    """Have a cluster answer so when it is asked for room, the last answer for ever."""
    answers = list(rooms)

    async def has_room(_):
        return answers.pop(0) if len(answers) > 1 else answers[0]

    monkeypatch.setattr(queue, "has_room", has_room)
    monkeypatch.setattr(queue, "ROOM_LOOK_S", 0.01)


async def test_a_run_that_a_cluster_with_room_for_it_refuses_is_given_up_once(tmp_path, monkeypatch):
    let_in(monkeypatch, True)
    _, (failed,), starts = await work(tmp_path, "sys.exit(2)", gpus=[None, None])
    assert (failed.state, failed.why) == (RunState.FAILED, "its process ended with exit code 2")
    assert starts == queue.MOST_DEATHS


async def test_runs_wait_for_a_cluster_that_is_away_or_full_however_often(tmp_path, monkeypatch):
    let_in(monkeypatch, *[False, True] * 6, True)
    text = "\nif starts.stat().st_size <= 6:\n    sys.exit(2)\n" + PLACE_ONE + FINISH
    _, standings, starts = await work(tmp_path, text, gpus=[None, None], seeds=3)
    assert [one.state for one in standings] == [RunState.FINISHED] * 3
    assert starts == 6 + 3
    assert "when the cluster has room: its process ended with exit code 2" in (tmp_path / "out").read_text()


async def test_a_place_that_refuses_runs_fails_none(tmp_path):
    text = "\nif os.environ['CUDA_VISIBLE_DEVICES'] == '1':\n    sys.exit(2)\ntime.sleep(0.2)\n" + FINISH
    _, standings, starts = await work(tmp_path, text, gpus=[("0",), ("1",)], seeds=6)
    assert [one.state for one in standings] == [RunState.FINISHED] * 6
    assert starts - 6 in range(1, 7), "none is refused twice"


async def test_a_run_whose_files_cannot_be_read_fails_alone(tmp_path):
    bad, _ = make_experiment(tmp_path, seeds=2).runs
    folder = new_run(bad.config)
    folder.ledger.write_text("begun")
    folder.metrics.mkdir()
    _, (failed, finished), _ = await work(tmp_path, FINISH, seeds=2)
    assert failed.state is RunState.FAILED
    assert "metrics.jsonl" in failed.why
    assert finished.state is RunState.FINISHED


@pytest.mark.parametrize("left", ["checkpoints/step-3", "metrics.jsonl"])
async def test_a_run_whose_ledger_was_lost_keeps_what_it_did(tmp_path, left):
    (run,) = make_experiment(tmp_path).runs
    folder = new_run(run.config)
    folder.ledger.touch()
    (folder.path / left).parent.mkdir(exist_ok=True)
    (folder.path / left).write_text("{}")
    await work(tmp_path, "sys.exit(2)")
    assert (folder.path / left).is_file()


async def test_a_run_that_dies_without_a_step_is_given_up_and_how_it_died_is_told(tmp_path):
    _, (failed,), starts = await work(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert (failed.state, failed.why) == (RunState.FAILED, "its process ended by SIGKILL")
    assert starts == queue.MOST_DEATHS


async def test_a_run_that_dies_once_is_taken_up_again_and_ends(tmp_path):
    text = "\nif starts.stat().st_size == 1:\n    sys.exit(1)\n" + FINISH
    _, (finished,), starts = await work(tmp_path, text)
    assert finished.state is RunState.FINISHED
    assert starts == 2


async def test_a_run_that_somebody_else_stops_is_taken_up_again_and_ends(tmp_path):
    text = "\nif starts.stat().st_size == 1:\n    sys.exit(130)\n" + FINISH
    _, (finished,), starts = await work(tmp_path, text)
    assert finished.state is RunState.FINISHED
    assert starts == 2


async def test_runs_start_with_the_settings_that_were_checked_whatever_the_base_says_by_then(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(BASE.read_text())
    text = "Path(changes['runs'], 'steps-' + changes['seed']).write_text(Path(sys.argv[1]).read_text())\n"
    text += f"Path({str(base)!r}).write_text('steps: none')\n" + FINISH
    _, standings, _ = await work(tmp_path, text, base=str(base), seeds=2)
    assert [one.state for one in standings] == [RunState.FINISHED] * 2
    found = [load_config(tmp_path / f"runs/steps-{seed}", []) for seed in range(2)]
    assert found == [one.run.config for one in standings]


async def test_a_bad_gpu_fails_no_run(tmp_path):
    text = "\nif os.environ['CUDA_VISIBLE_DEVICES'] == '1':\n    sys.exit(1)\ntime.sleep(0.2)\n" + FINISH
    _, standings, starts = await work(tmp_path, text, gpus=[("0",), ("1",)], seeds=6)
    assert [one.state for one in standings] == [RunState.FINISHED] * 6
    assert starts - 6 in range(queue.MOST_DEATHS, 7 * queue.MOST_DEATHS, queue.MOST_DEATHS), "on the bad one"


async def test_a_disk_that_is_full_fails_its_run_alone(tmp_path, monkeypatch):
    start = Queue._start

    def full(self, run, slot):
        if run.seed == 0:
            raise OSError(28, "No space left on device")
        return start(self, run, slot)

    monkeypatch.setattr(Queue, "_start", full)
    done, standings, _ = await work(tmp_path, FINISH, seeds=3)
    assert done
    assert [one.state for one in standings] == [RunState.WAITING, RunState.FINISHED, RunState.FINISHED]
    assert "No space left on device" in (tmp_path / "out").read_text()


async def test_runs_wait_for_a_disk_that_is_full_and_none_fails(tmp_path, monkeypatch):
    start, full = Queue._start, iter(["No space left on device"] * 20)

    def unstarted(self, run, slot):
        if next(full, ""):
            raise OSError(28, "No space left on device")
        return start(self, run, slot)

    monkeypatch.setattr(queue, "unwritable", lambda _: next(full, ""))
    monkeypatch.setattr(queue, "ROOM_LOOK_S", 0.01)
    monkeypatch.setattr(Queue, "_start", unstarted)
    _, standings, starts = await work(tmp_path, FINISH, seeds=3)
    assert [one.state for one in standings] == [RunState.FINISHED] * 3
    assert starts == 3
    assert "runs can be written: No space left on device" in (tmp_path / "out").read_text()


async def test_a_run_whose_folder_cannot_be_locked_fails_alone(tmp_path):
    (bad, _) = make_experiment(tmp_path, seeds=2).runs
    (new_run(bad.config).path / "lock").mkdir()
    _, standings, _ = await work(tmp_path, FINISH, seeds=2)
    assert [one.state for one in standings] == [RunState.UNFINISHED, RunState.FINISHED]
    assert "cannot be written (Is a directory)" in (tmp_path / "out").read_text()


async def test_a_table_that_nobody_can_be_shown_ends_no_run(tmp_path, monkeypatch):
    class Closed(io.StringIO):
        """A pipe whose reader has gone, or a full disk."""

        def write(self, text):
            raise BrokenPipeError

    closed = Console(file=Closed())
    monkeypatch.setattr("tests.launcher.test_queue.Console", lambda file: closed)
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # by which rich silences this very process
    _, standings, _ = await work(tmp_path, FINISH, seeds=2)
    assert [one.state for one in standings] == [RunState.FINISHED] * 2


def test_a_run_outlives_the_event_loop_that_started_it(tmp_path):
    async def start():
        return RunProcess(
            [sys.executable, "-c", "import time; time.sleep(600)"], log=tmp_path / "log", env=os.environ
        )

    started = asyncio.run(start())
    process = psutil.Process(started._process.pid)
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        del started
        gc.collect()
    assert process.status() != psutil.STATUS_ZOMBIE
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    "line",
    ["stopped", "stopped before it began", "runs/e-1 was stopped at once; go on", "ended at once, as asked"],
)
def test_a_run_that_was_asked_to_stop_has_not_failed(tmp_path, line):
    (tmp_path / "log").write_text(f"step 3\nlaminar: {line}\n")
    assert last_words(tmp_path / "log") == ""


async def test_a_run_that_has_finished_is_not_started(tmp_path):
    _, _, starts = await work(tmp_path, FINISH)
    assert starts == 1
    done, (finished,), starts = await work(tmp_path, FINISH)
    assert (done, finished.state, starts) == (True, RunState.FINISHED, 1)


async def test_a_run_that_another_release_finished_is_not_started(tmp_path):
    await work(tmp_path, FINISH)
    (tmp_path / "runs/e-base-s0-1/summary.json").write_text('{"finished": true, "of": "another release"}')
    _, (finished,), starts = await work(tmp_path, FINISH)
    assert (finished.state, starts) == (RunState.FINISHED, 1)


async def test_each_run_sees_the_gpus_of_its_slot(tmp_path):
    text = "Path(changes['runs'], 'gpus').write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n" + FINISH
    await work(tmp_path, text, gpus=[("2", "5")])
    assert (tmp_path / "runs/gpus").read_text() == "2,5"


async def test_a_folder_in_which_nothing_began_is_made_anew(tmp_path):
    (run,) = make_experiment(tmp_path).runs
    torn = new_run(run.config)
    torn.config.write_text("name: e-ba")
    text = "assert '--resume' not in sys.argv\n" + FINISH
    _, (finished,), _ = await work(tmp_path, text)
    assert finished.state is RunState.FINISHED


async def test_a_run_that_another_process_has_is_waited_for(tmp_path, monkeypatch):
    (run,) = make_experiment(tmp_path).runs
    folder = new_run(run.config)
    folder.lock()
    seen = []

    class Watched(Board):
        """A board that lets go of the run when it hears that it is held."""

        def note(self, run, state, why):
            seen.append(state)
            if state is RunState.HELD:
                folder.unlock()

    monkeypatch.setattr(queue, "LOOK_S", 0.01)
    monkeypatch.setattr("tests.launcher.test_queue.Board", Watched)
    _, (finished,), _ = await work(tmp_path, FINISH)
    assert seen == [RunState.HELD, RunState.WAITING, RunState.RUNNING]
    assert finished.state is RunState.FINISHED


async def test_a_run_that_another_process_has_holds_back_no_slot_that_needs_other_gpus(tmp_path, monkeypatch):
    held, _ = make_experiment(tmp_path, seeds=2).runs
    holder = hold(new_run(held.config), gpus="0")

    class Watched(Board):
        """A board that ends the other process once the other run is done."""

        def settle(self, standing):
            if standing.run.seed == 1:
                holder.communicate(b"")
            super().settle(standing)

    monkeypatch.setattr(queue, "LOOK_S", 0.01)
    monkeypatch.setattr("tests.launcher.test_queue.Board", Watched)
    text = (
        "Path(changes['runs'], 'gpu-' + changes['seed']).write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n" + FINISH
    )
    async with asyncio.timeout(60):
        _, standings, _ = await work(tmp_path, text, gpus=[("0",), ("1",)], seeds=2)
    assert [one.state for one in standings] == [RunState.FINISHED] * 2
    assert (tmp_path / "runs/gpu-1").read_text() == "1"


async def test_the_gpus_of_a_process_that_has_a_run_are_those_that_it_sees(tmp_path):
    (run,) = make_experiment(tmp_path).runs
    assert held_gpus(run, ["0", "1"]) == set(), "nobody has it"
    for seen, held in (("1,2", {"1"}), ("GPU-5e7a", {"0", "1"}), (None, {"0", "1"})):
        with hold(run.folder or new_run(run.config), gpus=seen) as holder:
            assert held_gpus(run, ["0", "1"]) == held
            holder.communicate(b"")


async def test_starts_on_a_cluster_wait_until_parts_have_their_gpus_and_no_longer(tmp_path):
    async with asyncio.timeout(60):
        _, standings, _ = await work(tmp_path, PLACE + FINISH, gpus=[None, None], seeds=2)
    assert [one.state for one in standings] == [RunState.FINISHED] * 2


async def test_a_signal_stops_the_run_that_goes_on_and_starts_no_other(tmp_path):
    done, standings, starts = await work(tmp_path, ASK_TO_STOP, seeds=2)
    assert not done
    assert starts == 1
    assert [one.state for one in standings] == [RunState.WAITING] * 2


async def test_a_run_that_a_signal_ended_in_its_first_moments_has_not_failed(tmp_path):
    text = "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(600)"  # SIGINT ends it with a traceback, as imports
    done, (standing,), starts = await work(tmp_path, text)
    assert not done
    assert (standing.state, standing.why, starts) == (RunState.WAITING, "", 1)


def test_a_guarded_process_gets_a_signal_when_its_parent_is_killed(tmp_path):
    child = program(tmp_path, "print(os.getpid(), flush=True)\ntime.sleep(600)")
    command = [*python("laminar_lab.launcher.guard"), "PARENT", *child, "config"]
    own = f"command = {command}; command[command.index('PARENT')] = str(os.getpid())"
    start = f"import os, subprocess; {own}; subprocess.run(command)"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True) as parent:
        guarded = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        gone, _ = psutil.wait_procs([guarded], timeout=60)
    assert gone
