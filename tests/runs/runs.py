"""Small real runs of `laminar train` in processes of their own."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from laminar_lab.audit.queries import accounting
from laminar_lab.audit.verify import verify
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.ledger.segments.frames import whole_frames

REPO = Path(__file__).parent.parent.parent
LAMINAR = str(Path(sys.executable).with_name("laminar"))
LAST_CHARS = 3000  # of a log
PATIENCE_S = 240.0

SMALL = [
    "steps=4",
    "staleness.max_staleness=2",  # so that a run of few steps still generates while it trains
    "warm_start.steps=3",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.batch_per_replica=16",
    "rollout.max_batch=16",
    "rollout.without_signal=train",
    "rollout.sampling.max_new_tokens=48",
    "learner.checkpoint_every=2",
    f"eval.sets.heldout={Path(__file__).with_name('heldout.jsonl')}",
]
ALONE = ("rollout.replicas=1", "relay.nodes=1")  # for laws that more of them have no part in


class TrainProcess:
    """`laminar train` of a config, the quickstart's for one, with small settings; ends with its test."""

    def __init__(
        self,
        folder: Path,
        *settings: str,
        resume: bool = False,
        config: Path = REPO / "configs/quickstart.yaml",
        small: Sequence[str] | None = None,
        laminar: Sequence[str] = (LAMINAR,),
    ):
        self.folder = folder
        given = [*SMALL, f"warm_start.cache={folder / 'warm'}"] if small is None else small
        where = ["name=small", f"runs={folder}"]
        command = [*laminar, "train", str(config), *given, *where, *settings, *(["--resume"] if resume else [])]
        self.process = subprocess.Popen(
            command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.communicate(timeout=PATIENCE_S)  # whoever outlives its family may hold the pipe

    @property
    def run(self) -> Path:
        return self.folder / "small-1"

    def family(self) -> list[psutil.Process]:
        try:
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True), *self._forked()]
        except psutil.NoSuchProcess:
            return self._forked()

    def _forked(self) -> list[psutil.Process]:
        """Parts that the session's fork server forked, which have logs of the run open, and all below them."""
        found = []
        for process in psutil.Process(int(os.environ["LAMINAR_FORK_SERVER_PID"])).children():
            with suppress(psutil.NoSuchProcess):
                if any(Path(file.path).is_relative_to(self.folder) for file in process.open_files()):
                    found += [process, *process.children(recursive=True)]
        return found

    def wait_until(self, look):
        """What `look` finds, once it finds something while the run goes on."""
        return wait_until(self.process, look)

    def wait_for_step(self, step: int) -> None:
        metrics = self.run / "metrics.jsonl"
        self.wait_until(lambda: metrics.is_file() and len(metrics.read_bytes().splitlines()) >= step)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def finish(self) -> tuple[int, str]:
        """Exit code and output; of a run that does not end, all that its parts said last."""
        try:
            output, _ = self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired as late:
            logs = sorted(self.run.glob("logs/*.log"))
            said = [f"{path.name}: {path.read_text()[-LAST_CHARS:]}" for path in logs]
            told = (late.output or b"").decode(errors="replace")
            raise AssertionError("\n".join([f"it does not end: {told}", *said])) from None
        return self.process.returncode, output

    def end_with(self, code: int) -> str:
        """Output of a run that ends with this exit code."""
        found, output = self.finish()
        assert found == code, output
        return output


def wait_until(process, look):
    """What `look` finds, once it finds something while the process goes on."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert process.poll() is None, process.stdout.read() if process.stdout else "it has ended"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def journaled(run: Path) -> dict[str, set[int]]:
    """Versions of the tokens that running trajectories have in journals, by trajectory."""
    found: dict[str, set[int]] = {}
    for path in (run / "segments").glob("*.journal"):
        with suppress(FileNotFoundError):  # its replica has just deleted it
            for piece in whole_frames(memoryview(path.read_bytes())):
                found.setdefault(piece.trajectory_id, set()).update(span.version for span in piece.spans)
    return found


def quickstart_model() -> Path:
    """The quickstart's model folder, without weights; made where it is missing, as in a fresh clone."""
    folder = REPO / "experiments/quickstart/data/model"
    if not folder.is_dir():
        subprocess.run([sys.executable, "experiments/quickstart/prepare.py"], check=True, cwd=REPO)
    return folder


def assert_laws(run: Path) -> None:
    """The record of a run holds the laws, and accounts for all trajectories."""
    assert verify(run) == []
    assert accounting(run).balanced


def forget_versions(run: Path) -> None:
    """A run that was stopped keeps its weights in shared memory for a resume; those of a test go with it."""
    shutil.rmtree(RunFolder(run).shm(Path("/dev/shm")), ignore_errors=True)


def wait_until_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those still there after a while."""
    return psutil.wait_procs(processes, timeout=30)[1]
