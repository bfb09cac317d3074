"""Growth over many steps on a virtual clock: the production scheduler, ledger and counters, four responses a step.

`python experiments/growth/virtual.py [--steps N] [--every N] [--runs FOLDER]` prints, per 1,000 steps, the growth
of each file of the record, of the memory that each production object reaches, and of the process.
"""

import argparse
import json
import sys
import time
from collections import deque
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np
import psutil
from sample import files_of, print_growth, read_samples, samples_path

from laminar_lab.bench.report import log_line
from laminar_lab.simulate.record import new_simulated_run
from laminar_lab.simulate.run import _Simulation, simulate
from laminar_py.config.loading import load_config
from laminar_py.records.metrics import StepRow

CONFIG = Path("configs/emulation/repack.yaml")
SMALL = (
    "rollout.replicas=2",
    "rollout.batch_per_replica=8",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.engine.start_spread_s=0",
)
FOREIGN = (ModuleType, type, FunctionType, BuiltinFunctionType, MethodType)


def reached_bytes(root: object, skip: set[int]) -> int:
    """Return the bytes of all objects that `root` reaches through attributes and containers, without `skip`."""
    seen, queue, total = set(skip), deque([root]), 0
    while queue:
        one = queue.pop()
        if id(one) in seen or isinstance(one, FOREIGN) or type(one).__module__.startswith(("asyncio", "_asyncio")):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, dict):
            queue.extend(one.keys())
            queue.extend(one.values())
        elif isinstance(one, list | tuple | set | frozenset | deque):
            queue.extend(one)
        elif not isinstance(one, str | bytes | int | float | np.ndarray):
            queue.append(getattr(one, "__dict__", None))
            names = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
            names += getattr(type(one), "__struct_fields__", ())
            queue.extend(getattr(one, name, None) for name in names)
    return total


def main() -> None:
    """Run, sample, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=1_000)
    parser.add_argument("--runs", default="experiments/growth/runs")
    options = parser.parse_args()
    config = load_config(CONFIG, [*SMALL, f"steps={options.steps}", f"runs={options.runs}"])
    run, process, began = new_simulated_run(config), psutil.Process(), time.monotonic()
    simulations: list[_Simulation] = []
    begin = _Simulation.__init__

    def remembered(self: _Simulation, *given: object, **named: object) -> None:
        begin(self, *given, **named)  # type: ignore[arg-type]
        simulations.append(self)

    _Simulation.__init__ = remembered  # type: ignore[method-assign]

    def show(row: StepRow) -> None:
        if row.step % options.every:
            return
        (one,) = simulations
        assert one._record is not None
        owned = {
            "scheduler": one._scheduler,
            "ledger": one._record.ledger,
            "counters": one._stats,
            "repacking": one._migration,
        }
        lab = {id(one), id(one._fleet), id(one._weights), id(one._rewards), id(one._learner), id(one._recorder)}
        found = {
            f"memory of {name}": reached_bytes(
                part, lab | {id(owner) for owner in owned.values() if owner is not part}
            )
            for name, part in owned.items()
        }
        for name, size in files_of(run.path):
            found[f"file {name}"] = found.get(f"file {name}", 0) + size
        found["process RSS, with the lab's rows"] = process.memory_info().rss
        found["process descriptors"], found["process threads"] = process.num_fds(), process.num_threads()
        with samples_path(run).open("a") as file:
            file.write(json.dumps({"at_s": row.rl_s, "step": row.step, **found}) + "\n")
        log_line(f"step {row.step} after {time.monotonic() - began:.0f} s")

    simulate(config, run=run, show=show)
    print_growth(read_samples(run))


if __name__ == "__main__":
    main()
