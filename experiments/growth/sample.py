"""Samples of a running run, and the growth of its files, memory, descriptors and threads.

`python experiments/growth/sample.py watch RUN` appends a sample to `RUN.growth.jsonl` every minute until the run
ends. `python experiments/growth/sample.py table RUN` prints how each resource grows, also while the run goes on.
"""

import argparse
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from laminar_py.ledger.row_files import read_last
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.observe.fleet import folder_bytes, pss_bytes
from laminar_py.records.metrics import StepRow

EVERY_S = 60.0
SETTLED = 0.2  # of the samples come before caches and pools have their size
Sample = dict[str, float]


def files_of(run: Path) -> Iterator[tuple[str, int]]:
    """Yield (kind, bytes) of each file of a run, e.g. `("logs/replica", 4096)`."""
    for parent, _, names in os.walk(run):
        for name in names:
            path = Path(parent, name)
            below = path.relative_to(run)
            folder = below.parts[0] if len(below.parts) > 1 else ""
            kind = f"{folder}/*{path.suffix}" if folder in ("segments", "checkpoints") else str(below)
            with contextlib.suppress(FileNotFoundError):
                yield kind, path.stat().st_size


def parts_of(controller: psutil.Process, ray: Path | None) -> list[psutil.Process]:
    """Return the processes below the controller, and those of the Ray cluster whose temporary folder is `ray`."""
    found = controller.children(recursive=True)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if ray and any(str(ray) in word for word in process.cmdline()) and process.pid != os.getpid():
                found += [process, *process.children(recursive=True)]
    return sorted(set(found) - {controller}, key=lambda process: process.pid)


def sample(run: RunFolder, controller: psutil.Process, *, ray: Path | None) -> Sample:
    """Return bytes and numbers of everything that may grow, by name."""
    row = read_last(run.metrics, StepRow)
    found: Sample = {"at_s": time.time() - controller.create_time(), "step": row.step if row else 0}
    sizes, counts = Counter[str](), Counter[str]()
    for kind, size in files_of(run.path):
        sizes[f"file {kind}"] += size
        counts[f"files {kind}"] += 1
    found |= sizes | {kind: count for kind, count in counts.items() if "*" in kind}
    found["shared memory"] = folder_bytes(run.shm(Path("/dev/shm")))
    found["Ray session"] = folder_bytes(ray) if ray else 0
    for place, process in enumerate([controller, *parts_of(controller, ray)]):
        name = f"process {place} {process.name() if place else 'controller'}"
        with contextlib.suppress(psutil.Error, FileNotFoundError):
            found[f"{name} RSS"], found[f"{name} PSS"] = process.memory_info().rss, pss_bytes(process.pid)
            found[f"{name} descriptors"], found[f"{name} threads"] = process.num_fds(), process.num_threads()
    return found


def watch(run: RunFolder, *, every_s: float, ray: Path | None) -> None:
    """Append a sample of the run to its file until its controller ends."""
    assert run.holder is not None, f"{run.path} has no controller"
    controller = psutil.Process(run.holder[1])
    while controller.is_running():
        with contextlib.suppress(psutil.Error), samples_path(run).open("a") as file:
            file.write(json.dumps(sample(run, controller, ray=ray)) + "\n")
        time.sleep(every_s)


def samples_path(run: RunFolder) -> Path:
    """Return the file of a run's samples, beside the run's folder."""
    return run.path.with_name(f"{run.name}.growth.jsonl")


def read_samples(run: RunFolder) -> list[Sample]:
    """Read the samples of a run."""
    return [json.loads(line) for line in samples_path(run).read_text().splitlines()]


def print_growth(samples: list[Sample]) -> None:
    """Print first and last size of each resource, and its growth per 1,000 steps and per hour."""
    kept = samples[int(len(samples) * SETTLED) :]
    steps, hours = [one["step"] for one in kept], [one["at_s"] / 3600 for one in kept]
    print(f"{len(kept)} samples, steps {steps[0]:.0f} to {steps[-1]:.0f}, {hours[-1] - hours[0]:.2f} h")
    print("| Resource | First | Last | Per 1,000 steps | Per hour |\n|---|---|---|---|---|")
    for name in sorted({name for one in kept for name in one} - {"step", "at_s"}):
        sizes = [one.get(name, 0.0) for one in kept]
        by_step, by_hour = (np.polyfit(over, sizes, 1)[0] if len(kept) > 1 else 0.0 for over in (steps, hours))
        ends = " | ".join(f"{size:,.0f}" for size in (sizes[0], sizes[-1], by_step * 1000, by_hour))
        print(f"| {name} | {ends} |")


def main() -> None:
    """Watch a run, or print its growth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("watch", "table"))
    parser.add_argument("run", type=Path)
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds between samples")
    parser.add_argument("--ray", type=Path, help="--temp-dir of the Ray cluster of the run")
    options = parser.parse_args()
    run = RunFolder(options.run)
    if options.what == "watch":
        watch(run, every_s=options.every, ray=options.ray)
    else:
        print_growth(read_samples(run))


if __name__ == "__main__":
    main()
