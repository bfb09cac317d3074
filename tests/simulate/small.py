"""A small run, simulated in a second: 4 replicas, 6 steps."""

from pathlib import Path

from laminar_lab.simulate.record import new_simulated_run
from laminar_lab.simulate.run import simulate
from laminar_py.config.loading import load_config

CONFIG = Path("configs/emulation/repack.yaml")
SMALL = (
    "steps=6",
    "rollout.replicas=4",
    "rollout.batch_per_replica=96",
    "rollout.prompts_per_step=48",
    "rollout.engine.start_spread_s=200",
)
FAILING = ("rollout.engine.simulation.replica_mtbf_s=20", "rollout.engine.simulation.restart_s=3")


def small(*settings):
    return load_config(CONFIG, [*SMALL, *settings])


def run(*settings):
    return simulate(small(*settings))


def run_recorded(folder, *settings):
    """What came out, and the folder of its record."""
    config = small(f"runs={folder}", *settings)
    run = new_simulated_run(config)
    return simulate(config, run=run), run.path
