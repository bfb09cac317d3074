"""No repacking, the paper's planner, ours, and replicas that are always full: 16 emulated replicas, real runtime.

`python experiments/repack/run.py [--json] [--seeds N]` takes six to seven minutes a seed; the same rows are part
of `laminar bench repack`.
"""

import argparse
import sys

from laminar_py.bench.repack_workload import workload_rows
from laminar_py.bench.report import show


def main() -> None:
    """Run all four for each seed and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    rows = workload_rows(seeds=range(args.seeds), tell=lambda line: print(line, file=sys.stderr, flush=True))
    show("repack", rows, as_json=args.json)


if __name__ == "__main__":
    main()
