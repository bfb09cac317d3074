"""What it costs to record a run: CPU seconds of emitting and writing over all CPU seconds of the quickstart.

`python experiments/recording/run.py [--json] [--steps N]` trains with the controller in this process, and has a
stopwatch of CPU time around every entrance of its ledger; the CPU time of all processes of the run is looked at
twice a second. What other processes write, segments and archive, is written once more after the run, and timed.
"""

import argparse
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from rich.console import Console

from laminar_lab.bench.report import Row, show
from laminar_py.config.loading import load_config
from laminar_py.ledger import trajectory
from laminar_py.ledger.archive import ArchiveRequest, archive_files, archive_pieces, file_name, file_pieces
from laminar_py.ledger.database import reading, segments_path
from laminar_py.ledger.ledger import Ledger
from laminar_py.ledger.pieces import PieceRow, StoredPiece, piece_rows, stored_pieces
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.writer import SegmentWriter
from laminar_py.ledger.writer import Writer
from laminar_py.records.codec import encode
from laminar_py.runtime.orchestrator.launch import launch

CONFIG = Path("configs/quickstart.yaml")
LOOK_S = 0.5
CALIBRATION = 100_000
ENTRANCES = ("append", "append_all", "store_prompt", "store_tokens", "store_columns", "_cut")


class Stopwatch:
    """CPU seconds by name; what is called inside a watched call counts once."""

    def __init__(self) -> None:
        self.spent_s: Counter[str] = Counter()
        self.calls = 0
        self._depth = threading.local()

    def watch(self, owner: Any, name: str) -> None:
        """Time this function of a class or module from now on."""
        setattr(owner, name, self._timed(getattr(owner, name), name))

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._depth, "inside", False):
                return function(*args, **kwargs)
            self._depth.inside, began = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth.inside = False
                self.spent_s[name] += time.thread_time() - began
                self.calls += 1

        return timed


def own_s() -> float:
    """CPU seconds that a stopwatch adds to each call."""
    watch = Stopwatch()
    nothing = watch._timed(lambda: None, "nothing")
    for _ in range(CALIBRATION):
        nothing()
    return watch.spent_s["nothing"] / CALIBRATION


class Processes(threading.Thread):
    """The CPU time of this process and all below it, those that have ended included."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._seen_s: dict[tuple[int, float], float] = {}
        self._ended = threading.Event()

    def run(self) -> None:
        """Look until `total_s` is asked for."""
        while not self._ended.wait(LOOK_S):
            self._look()

    def total_s(self) -> float:
        """Seconds so far."""
        self._ended.set()
        self._look()
        return sum(self._seen_s.values())

    def _look(self) -> None:
        me = psutil.Process()
        for process in (me, *me.children(recursive=True)):
            try:
                times = process.cpu_times()
                self._seen_s[process.pid, process.create_time()] = times.user + times.system
            except psutil.NoSuchProcess:
                continue


def write_again(run: Path, watch: Stopwatch) -> None:
    """Write all pieces of a run to segments, one by one as replicas did, and then to an archive."""
    with reading(run) as connection:
        here = list(stored_pieces(PayloadReader(segments_path(run)), piece_rows(connection)))
    pieces = here + [piece for path in archive_files(run) for piece in file_pieces(path)]
    with TemporaryDirectory() as folder:
        writer = SegmentWriter(segments_path(Path(folder)), "replica-0-1-0")
        watch.watch(writer, "write_all")
        rows = [_row(piece, writer) for piece in sorted(pieces, key=lambda piece: piece.trajectory)]
        writer.close()
        request = encode(ArchiveRequest(folder, file_name(1, 0), rows))
        watch._timed(archive_pieces, "archive_pieces")(request)


def _row(stored: StoredPiece, writer: SegmentWriter) -> PieceRow:
    assert stored.piece is not None, f"trajectory {stored.trajectory}: {stored.fault}"
    at = writer.write(stored.piece)
    what = (stored.trajectory, stored.name, "", stored.start, stored.start, "[]", 0)
    return PieceRow(*what, at.segment, at.offset, at.num_bytes, at.digest)


def main() -> None:
    """Train once and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    watch, processes = Stopwatch(), Processes()
    for name in ENTRANCES:
        watch.watch(Ledger, name)
    watch.watch(Writer, "write")
    watch.watch(trajectory, "response_digest")
    processes.start()
    with TemporaryDirectory() as cache:  # the warm start is a part of the quickstart
        overrides = ["name=recording", f"steps={args.steps}", f"warm_start.cache={cache}"]
        summary = launch(load_config(CONFIG, overrides), resume=None, console=Console(stderr=True))
    total_s = processes.total_s()
    write_again(Path(summary.run), watch)
    spent_s = sum(watch.spent_s.values()) - watch.calls * own_s()
    conditions = f"quickstart, {args.steps} steps, {summary.trajectories.issued} trajectories"
    rows = [
        Row("recording_share", spent_s / total_s, "of all CPU seconds", conditions),
        Row("recording_s", spent_s, "CPU s", ", ".join(f"{n} {s:.2f}" for n, s in watch.spent_s.most_common())),
        Row("total_s", total_s, "CPU s", "all processes of the run"),
        Row("trajectory_us", spent_s / summary.trajectories.issued * 1e6, "CPU us each", conditions),
    ]
    show("recording", rows, as_json=args.json)


if __name__ == "__main__":
    main()
