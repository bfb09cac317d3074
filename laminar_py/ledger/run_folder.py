"""The folder of one run: `runs/<name>-<n>/`. Owns its names, the lock and the list of processes.

A second controller on the same run is refused; processes that a killed controller left behind are ended by
process id and start time, never by name.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import signal
import socket
from pathlib import Path
from typing import TextIO

import psutil

from laminar_py.config.loading import dump_config
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.ledger.database import LEDGER_NAME, segments_path
from laminar_py.records.disk import sync, write_file
from laminar_py.records.events import Checkpointed

_RUN = "run"  # file in the folder in shared memory


class HeldError(ConfigError):
    """A run that another process has."""


class RunFolder:
    """Paths of a run, e.g. `runs/quickstart-3`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.ledger = path / LEDGER_NAME  # which everybody reads
        self.live_ledger = self.ledger  # which its owner reads and writes; see `live.settle`
        self.archive = path / "archive"
        self.segments = segments_path(path)  # of this host
        self.went_back = False  # to a copy of its ledger, since the live one is not there; see `live.settle`
        self.metrics = path / "metrics.jsonl"
        self.fleet = path / "fleet.jsonl"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.source = path / "source.json"  # of an evaluation: what it is of, there once its weights are
        self.placed = path / "placed"  # written when all processes of a start have their GPUs
        self._processes = path / "processes.json"
        self._lock: TextIO | None = None
        self._lock_file = path / "lock"

    @property
    def name(self) -> str:
        """`<name>-<n>`."""
        return self.path.name

    @property
    def has_ledger(self) -> bool:
        """True once a ledger is laid out: an empty file is one whose making was interrupted."""
        return self.ledger.is_file() and self.ledger.stat().st_size > 0

    @property
    def is_unbegun(self) -> bool:
        """True where nothing in it is worth keeping: no ledger, no step and no checkpoint."""
        done = any(self.checkpoints.glob("*")) or (self.metrics.exists() and self.metrics.stat().st_size > 0)
        return not (self.has_ledger or done)

    def has(self, checkpoint: Checkpointed) -> bool:
        """True if the folder of that checkpoint is still there."""
        return (self.path / checkpoint.path).is_dir()

    def shm(self, root: Path) -> Path:
        """Folder of this run's weight versions, with one folder per relay node below it."""
        return root / f"laminar-{self._identity()}"

    def live_folder(self, disk: Path) -> Path:
        """Folder of this run's live ledger on a disk of its controller's host."""
        return disk / f"laminar-ledger-{self._identity()}"

    def local_segments(self, disk: Path) -> Path:
        """Folder of this run's segments on a disk of each host, with a name that no other run ever had."""
        target = os.readlink(self.segments) if self.segments.is_symlink() else ""
        begin = f"laminar-segments-{self._identity()}-"
        if Path(target).parent == disk and Path(target).name.startswith(begin):
            return Path(target)
        return disk / f"{begin}{secrets.token_hex(4)}"

    def _identity(self) -> str:
        """Name of the run that keeps it apart from runs of the same name in other folders."""
        from hashlib import blake2b

        place = self.path.resolve()
        return f"{place.parent.name}-{self.name}-{blake2b(str(place).encode(), digest_size=4).hexdigest()}"

    def lock(self) -> None:
        """Own the run until this process ends. Raises HeldError if another does, ConfigError if nobody can."""
        try:
            lock = self._lock_file.open("a+")
        except OSError as error:
            raise ConfigError(f"run={self.path}: cannot be written ({error.strerror}); make it writable") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            if isinstance(error, BlockingIOError):
                raise HeldError(f"run={self.path}: another process runs it; end that one first") from None
            raise ConfigError(
                f"run={self.path}: its file system gives no locks ({error.strerror}); name another with runs=..."
            ) from None
        self._lock = lock
        with contextlib.suppress(OSError):  # a full disk, of which those hear who need it
            lock.truncate(0)
            lock.write(f"{socket.gethostname()} {os.getpid()}")
            lock.flush()

    @property
    def holder(self) -> tuple[str, int] | None:
        """Host and id of the process that has the lock, or had it last; None where nobody wrote that down."""
        told = self._lock_file.read_text().split() if self._lock_file.is_file() else []
        return (told[0], int(told[1])) if len(told) == 2 and told[1].isdigit() else None

    def try_lock(self) -> bool:
        """True if the run was nobody's, and is this process's now."""
        try:
            self.lock()
        except ConfigError:
            return False
        return True

    @property
    def is_led(self) -> bool:
        """True while a controller owns it; False also for a folder that nobody can own."""
        try:
            self.lock()
        except HeldError:
            return True
        except ConfigError:
            return False
        self.unlock()
        return False

    def unlock(self) -> None:
        """Give up what `lock` took."""
        assert self._lock is not None, f"{self.path} is not locked"
        self._lock.close()
        self._lock = None

    def note_shm(self, folder: Path) -> None:
        """Put the run's path into its folder in shared memory, from which its name does not follow."""
        with contextlib.suppress(OSError):  # no room, of which those hear who need it
            (folder / _RUN).write_text(str(self.path.resolve()))

    def note_processes(self, pids: list[int]) -> None:
        """Remember which processes belong to this run, for `reap`."""
        rows = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                rows.append([pid, psutil.Process(pid).create_time()])
        partial = self._processes.with_suffix(".tmp")
        partial.write_text(json.dumps(rows))
        partial.replace(self._processes)

    def reap(self) -> int:
        """End what an earlier, killed controller of this run left behind; the number of processes."""
        if not self._processes.is_file():
            return 0
        reaped = []
        for pid, created in json.loads(self._processes.read_text()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.create_time() == created:
                    process.send_signal(signal.SIGKILL)
                    reaped.append(process)
        psutil.wait_procs(reaped, timeout=10)
        self._processes.unlink()
        return len(reaped)


def run_of(folder: Path) -> RunFolder | None:
    """The run that a folder in shared memory is of; None for a folder that is no run's, or another user's."""
    with contextlib.suppress(OSError):
        if path := (folder / _RUN).read_text():
            return RunFolder(Path(path))
    return None


def new_run(config: RunConfig) -> RunFolder:
    """The next `runs/<name>-<n>`, its owner's alone, with the resolved config in it. Raises ConfigError."""
    try:
        config.runs.mkdir(parents=True, exist_ok=True)
        while True:
            newest = max((number for number, _ in _existing(config)), default=0)
            run = RunFolder(config.runs / f"{config.name}-{newest + 1}")
            with contextlib.suppress(FileExistsError):  # another start took this number
                run.path.mkdir(mode=0o700)
                break
        for folder in (run.checkpoints, run.logs):
            folder.mkdir()
        write_file(run.config, dump_config(config).encode())
        for folder in (run.path, config.runs):
            sync(folder)
    except OSError as error:
        raise ConfigError(
            f"runs={config.runs}: no run can be made there ({error}); make room, or name another folder"
        ) from None
    return run


def newest_run(config: RunConfig) -> RunFolder:
    """The run of this name that `--resume` continues. Raises ConfigError if there is none."""
    runs = runs_of(config)
    if not runs:
        raise ConfigError(f"name={config.name}: no run in {config.runs} to resume; start one without --resume")
    return runs[0]


def run_at(path: Path) -> RunFolder:
    """The run in a folder. Raises ConfigError if there is none."""
    run = RunFolder(path)
    if not run.config.is_file():
        raise ConfigError(f"run={path}: no config.yaml in it; name a run's folder, e.g. runs/quickstart-1")
    return run


def runs_of(config: RunConfig) -> list[RunFolder]:
    """Runs of this name, the newest first."""
    return [RunFolder(path) for _, path in sorted(_existing(config), reverse=True)]


def _existing(config: RunConfig) -> list[tuple[int, Path]]:
    pattern = re.compile(re.escape(config.name) + r"-(\d+)")
    found = []
    for path in config.runs.glob(f"{config.name}-*"):
        match = pattern.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return found
