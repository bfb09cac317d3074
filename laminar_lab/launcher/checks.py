"""Files, rewards and engines of an experiment's runs, looked at before any of them starts."""

from pathlib import Path

from laminar_lab.launcher.experiment import Experiment
from laminar_lab.launcher.standing import RunState, read_standings
from laminar_py.config import ConfigError
from laminar_py.runtime.preflight import check_inputs, check_shared_memory


def check_runs(experiment: Experiment, *, at_once: int) -> list[Path]:
    """Check what `laminar train` checks, once for each variant with runs ahead; the scripts that made their files.

    Seeds share all of it, and the `at_once` runs side by side then find their files made. Raises `ConfigError`.
    """
    ahead = [one.run for one in read_standings(experiment) if one.state is not RunState.FINISHED]
    first = {run.variant: run for run in reversed(ahead)}
    for variant, run in first.items():
        try:
            check_inputs(run.config)
            if run.config.cluster.address is None:
                check_shared_memory(run.config, runs=min(at_once, len(ahead)))
        except ConfigError as error:
            raise ConfigError(f"variant {variant}: {error}") from None
    scripts = (run.config.data.prepare for run in first.values())
    return list(dict.fromkeys(script for script in scripts if script is not None))
