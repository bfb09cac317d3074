"""What the checks cost: CPU seconds inside them, and of runs with and without them in pairs; see README.md."""

import argparse
import json
import os
import resource
import statistics
import tempfile
from collections import Counter
from pathlib import Path

from run import train

STEPS = 120


def cpu_seconds(name: str, settings: list[str]) -> float:
    """CPU seconds of all processes of a run."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    with tempfile.TemporaryDirectory() as folder:
        code, output = train(name, Path(folder), settings)
    assert code == 0, output
    return spent() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("settings", nargs="*", help="of the runs, e.g. rollout.prompts_per_step=128 steps=30")
    options = parser.parse_args()
    shares = []
    for seed in range(options.pairs):
        settings = [f"steps={STEPS}", f"seed={seed}", *options.settings]
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SILENT_COST"] = folder
            checked = cpu_seconds("timed", settings)
            parts: Counter[str] = Counter()
            for path in Path(folder).iterdir():
                parts.update(json.loads(path.read_text()))
            del parts["written"]
        unchecked = cpu_seconds("unchecked", settings)
        shares.append(sum(parts.values()) / checked)
        inside = f"{sum(parts.values()):.2f} s of {checked:.1f} s inside the checks: {shares[-1]:.2%}"
        print(f"pair {seed}: {inside}; {unchecked:.1f} s without: {checked / unchecked - 1:+.1%}", flush=True)
        print("\n".join(f"    {seconds:7.3f} s {name}" for name, seconds in parts.most_common()), flush=True)
    print(f"median {statistics.median(shares):.2%} inside the checks")


if __name__ == "__main__":
    main()
