"""The folder of one run, `runs/<name>-<n>/`: its file names and its lock, which refuses a second controller."""

import contextlib
import fcntl
import os
import re
import socket
from hashlib import blake2b
from pathlib import Path
from typing import TextIO

from laminar_py.config.loading import dump_config
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.ledger.database import LEDGER_NAME, segments_path
from laminar_py.records.events import Checkpointed
from laminar_py.records.host import sync, write_file

LOCK = "lock"  # file in a run's folder, written when a process gets the lock
_RUN = "run"  # file in a run's folder in shared memory, with the path of the run


class RunLockedError(ConfigError):
    """Another process holds the lock of a run."""


class RunFolder:
    """Paths of a run, e.g. `runs/quickstart-3`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.ledger = path / LEDGER_NAME
        self.segments = segments_path(path)
        self.metrics = path / "metrics.jsonl"
        self.fleet = path / "fleet.jsonl"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.source = path / "source.json"  # the weights of an evaluation, written once they have arrived
        self._lock: TextIO | None = None
        self._lock_file = path / LOCK

    @property
    def name(self) -> str:
        """`<name>-<n>`."""
        return self.path.name

    @property
    def has_ledger(self) -> bool:
        """Whether the run has a ledger; an empty file, left by a crash, is none."""
        return self.ledger.is_file() and self.ledger.stat().st_size > 0

    @property
    def is_unbegun(self) -> bool:
        """Whether the run has no ledger, no step and no checkpoint."""
        done = any(self.checkpoints.glob("*")) or (self.metrics.exists() and self.metrics.stat().st_size > 0)
        return not (self.has_ledger or done)

    def has(self, checkpoint: Checkpointed) -> bool:
        """Whether the folder of a checkpoint exists."""
        return (self.path / checkpoint.path).is_dir()

    def shm(self, root: Path) -> Path:
        """Return the run's folder for weight versions, below `root` in shared memory."""
        place = self.path.resolve()
        digest = blake2b(str(place).encode(), digest_size=4).hexdigest()  # differs for other folders
        return root / f"laminar-{place.parent.name}-{self.name}-{digest}"

    def lock(self) -> None:
        """Lock the run until this process ends.

        Raises `RunLockedError` if another process holds it, `ConfigError` if the file system gives no lock.
        """
        try:
            lock = self._lock_file.open("a+")
        except OSError as error:
            raise ConfigError(f"run={self.path}: cannot be written ({error.strerror}); make it writable") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            if isinstance(error, BlockingIOError):
                raise RunLockedError(f"run={self.path}: another process runs it; end that one first") from None
            raise ConfigError(
                f"run={self.path}: its file system gives no locks ({error.strerror}); name another with runs=..."
            ) from None
        self._lock = lock
        with contextlib.suppress(OSError):  # on a full disk, the ledger's writes raise
            lock.truncate(0)
            lock.write(f"{socket.gethostname()} {os.getpid()}")
            lock.flush()
            os.fsync(lock.fileno())  # its time is now, also on a network

    @property
    def holder(self) -> tuple[str, int] | None:
        """Host and process id of the last holder of the lock; None if the lock file has none."""
        words = self._lock_file.read_text().split() if self._lock_file.is_file() else []
        return (words[0], int(words[1])) if len(words) == 2 and words[1].isdigit() else None

    def try_lock(self) -> bool:
        """Lock the run if it is free; return whether this process got the lock."""
        try:
            self.lock()
        except ConfigError:
            return False
        return True

    @property
    def is_locked(self) -> bool:
        """Whether a process holds the lock; False also if the file system gives no locks."""
        try:
            self.lock()
        except RunLockedError:
            return True
        except ConfigError:
            return False
        self.unlock()
        return False

    def unlock(self) -> None:
        """Release the lock."""
        assert self._lock is not None, f"{self.path} is not locked"
        self._lock.close()
        self._lock = None

    def note_shm(self, folder: Path) -> None:
        """Write the run's path into its folder in shared memory, for `run_of`."""
        with contextlib.suppress(OSError):  # without room, the publisher's writes raise
            (folder / _RUN).write_text(str(self.path.resolve()))


def run_of(folder: Path) -> RunFolder | None:
    """Return the run that a folder in shared memory names; None if it names none or cannot be read."""
    with contextlib.suppress(OSError):
        if path := (folder / _RUN).read_text():
            return RunFolder(Path(path))
    return None


def new_run(config: RunConfig) -> RunFolder:
    """Create the next `runs/<name>-<n>`, private to its user, with the resolved config. Raises `ConfigError`."""
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
            f"runs={config.runs}: cannot create a run there ({error}); make room, or name another folder"
        ) from None
    return run


def newest_run(config: RunConfig) -> RunFolder:
    """Return the newest run of a config's name, for `--resume`. Raises `ConfigError` if there is none."""
    runs = runs_of(config)
    if not runs:
        raise ConfigError(f"name={config.name}: no run in {config.runs} to resume; start one without --resume")
    return runs[0]


def run_at(path: Path) -> RunFolder:
    """Return the run in a folder. Raises `ConfigError` if there is none."""
    run = RunFolder(path)
    if not run.config.is_file():
        raise ConfigError(f"run={path}: no config.yaml in it; name a run's folder, e.g. runs/quickstart-1")
    return run


def runs_of(config: RunConfig) -> list[RunFolder]:
    """Return the runs of a config's name, newest first."""
    return [RunFolder(path) for _, path in sorted(_existing(config), reverse=True)]


def _existing(config: RunConfig) -> list[tuple[int, Path]]:
    """Return (number, folder) of each run with the config's name."""
    pattern = re.compile(re.escape(config.name) + r"-(\d+)")
    found = []
    for path in config.runs.glob(f"{config.name}-*"):
        match = pattern.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return found
