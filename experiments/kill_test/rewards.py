"""The kill test with programs, a judge and a function as rewards: scorers, sandboxes and the judge die too.

`python experiments/kill_test/rewards.py [--kills 20] [--seed 0] [--only VICTIM ...] [--json] [key=value ...]`
trains the run of rewards.yaml. At the end every law must hold, `laminar rescore` must reproduce every reward, and
nothing may be left of the sandboxes. Otherwise the exit code is 1.
"""

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from run import CONTROLLER, EVERYTHING, Run, check, kill_and_prove, kill_process, make_arguments, run_settings

from laminar_lab.audit.queries import accounting
from laminar_lab.bench.report import Row

HERE = Path(__file__).parent
JUDGE = "judge"
WORKERS = 2
PROGRAM = "program"
BELOW_SCORERS = {  # by a part of the command line; that of a program is its zygote's
    "sandbox": "sandbox.inside.zygote",
    PROGRAM: "sandbox.inside.zygote",
    "function": "reward.calls.child",
}
VICTIMS = (
    *(f"{kind}-{index}" for kind in ("scorer", *BELOW_SCORERS) for index in range(WORKERS)),
    JUDGE,
    "replica-0",
    "learner-0",
    CONTROLLER,
    EVERYTHING,
)
REWARD = (
    "reward.use=[code, {{kind: judge, urls: [{url}], model: coin, unless: code, weight: 0.5}},"
    " {{kind: function, path: {function}:short, weight: 0.1}}]"
)
APPEAR_S, END_S = 5.0, 30.0


class JudgeServer:
    """The judge's process, always on one port."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self._port = taken.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/v1"
        self._process = self._start()

    def kill(self) -> bool:
        """Kill the judge and start another one."""
        self.end()
        self._process = self._start()
        return True

    def end(self) -> None:
        """Kill the judge."""
        self._process.kill()
        self._process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen([sys.executable, str(HERE / "judge.py"), str(self._port)])
        deadline = time.monotonic() + END_S
        while not self._answers():
            check(process.poll() is None and time.monotonic() < deadline, "the judge does not start")
            time.sleep(0.05)
        return process

    def _answers(self) -> bool:
        with socket.socket() as trial:
            return trial.connect_ex(("127.0.0.1", self._port)) == 0


class ScoredRun(Run):
    """A run whose scorers have child processes; `scratch` takes the temporary files of all."""

    def __init__(self, judge: JudgeServer, scratch: Path, settings: list[str]) -> None:
        self._judge = judge
        self._scratch = scratch
        self._processes = set[psutil.Process]()  # seen at a kill
        reward = REWARD.format(url=judge.url, function=HERE / "function.py")
        super().__init__(HERE / "rewards.yaml", [f"reward.workers={WORKERS}", reward, *settings])

    def kill(self, victim: str) -> bool:
        """Kill a victim now; return False if it is not there at this moment."""
        self.note_processes()
        kind, _, index = victim.rpartition("-")
        if victim == JUDGE:
            return self._judge.kill()
        if kind not in BELOW_SCORERS:
            return super().kill(victim)
        found = descendants(self._pid(f"scorer-{index}"), BELOW_SCORERS[kind])
        return end_child(found) if kind == PROGRAM else bool(found) and kill_process(random.choice(found))

    def note_processes(self) -> None:
        """Note the processes that must be gone in the end."""
        self._processes |= set(psutil.Process(self._process.pid).children(recursive=True))

    def finish(self) -> int:
        """Note the processes of the run, and wait for its end; return the exit code."""
        self.note_processes()
        return super().finish()

    def left_behind(self) -> list[str]:
        """Return the processes and files that are still there.

        A sandbox whose processes are all killed at one moment leaves the folder of its program.
        """
        deadline = time.monotonic() + END_S
        while any(map(lives, self._processes)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [
            *(str(process) for process in self._processes if lives(process)),
            *(str(path) for path in self._scratch.glob("laminar-*") if "-sandbox-" not in path.name),
        ]


def lives(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants(process: int, what: str) -> list[int]:
    """Return the descendants of a process with this text in their command line."""
    try:
        family = psutil.Process(process).children(recursive=True)
        return [one.pid for one in family if any(what in word for word in one.cmdline())]
    except psutil.NoSuchProcess:
        return []


def end_child(zygotes: list[int]) -> bool:
    """Kill the next program that a zygote forks, which lives for milliseconds; return False if none comes."""
    deadline = time.monotonic() + APPEAR_S
    while time.monotonic() < deadline:
        for zygote in zygotes:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                for child in map(int, Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()):
                    if child not in zygotes and kill_process(child):
                        return True
    return False


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a folder for all temporary files."""
    folder = Path(tempfile.mkdtemp(prefix="lk-"))
    os.environ["TMPDIR"] = str(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def reward_rows(run: ScoredRun) -> tuple[list[Row], bool]:
    """Make the rows on rewards and leftovers.

    Also return whether all rewards come out again and nothing is left.
    """
    left = run.left_behind()
    print(*left, sep="\n", file=sys.stderr)
    command = [str(Path(sys.executable).with_name("laminar")), "rescore", str(run.folder)]
    same = subprocess.run(command, stdout=sys.stderr, check=False).returncode == 0
    dropped = accounting(run.folder).train.dropped
    reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items() if count)
    rows = [
        Row("dropped", sum(dropped.values()), "responses", reasons or "none"),
        Row("rescored", float(same), "1: all rewards equal", "laminar rescore"),
        Row("left_behind", len(left), "things", "processes and temporary files"),
    ]
    return rows, same and not left


def main() -> None:
    """Kill, resume, prove."""
    args = make_arguments(__doc__, victims=VICTIMS, steps=300).parse_args()
    random.seed(args.seed)
    judge = JudgeServer()
    with scratch_folder() as scratch:
        try:
            run = ScoredRun(judge, scratch, run_settings(args))
            kill_and_prove(run, args, name="kill_test_rewards", judge=reward_rows)
        finally:
            judge.end()


if __name__ == "__main__":
    main()
