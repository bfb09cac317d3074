"""Figures of one reading of a run, and the diagnosis that follows from them. Called by every view.

A figure is computed when it is first asked for, so that a view pays for what it shows, and all show the same.
"""

from functools import cached_property
from pathlib import Path

from laminar_py.config.section import ConfigError
from laminar_py.ledger.database import ledger_path
from laminar_py.observe.diagnosis import Diagnosis, diagnose
from laminar_py.observe.mean_step import mean_step
from laminar_py.observe.pipeline import measure_pipeline
from laminar_py.observe.quality import Quality, measure_quality
from laminar_py.observe.record import Snapshot, fleet_sizes, read_snapshot
from laminar_py.observe.tails import (
    Staleness,
    Stragglers,
    Tails,
    measure_staleness,
    measure_stragglers,
    measure_tails,
)
from laminar_py.observe.tokens import DropTable, TokenAccount, account_tokens, measure_drops, tell_dropping
from laminar_py.records.events import RunStarted


class RunReport:
    """Figures of one run."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    @property
    def run(self) -> str:
        """Folder of the run."""
        return str(self.snapshot.run)

    @property
    def simulation(self) -> str:
        """Words on what a simulation is not, and on its seconds; "" for a real run."""
        starts = (started for _, started in self.snapshot.history.of_kind(RunStarted))
        if not any(started.simulated for started in starts):
            return ""
        config = self.snapshot.config
        speed = 1.0 if config is None or config.emulation is None else config.emulation.compression
        return f"nothing was generated or trained; a second of its virtual clock is {speed:g} s of the GPUs"

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """Limits of the run; None before the first whole step, or without its config."""
        snapshot, config = self.snapshot, self.snapshot.config
        if config is None:
            return None
        pipeline = measure_pipeline(config, snapshot.trajectories, snapshot.stays, snapshot.history)
        found = mean_step(config, snapshot.trajectories, pipeline, snapshot.samples)
        return None if found is None else diagnose(found, config)

    @property
    def config_file(self) -> str:
        """File of the config that the run began with."""
        return str(ledger_path(self.snapshot.run).parent / "config.yaml")

    @property
    def steps(self) -> int:
        """Number of the last step that counts."""
        return max((step.step for _, step in self.snapshot.history.steps), default=0)

    @property
    def trained_tokens(self) -> int:
        """Response tokens in learner steps, whatever their weight."""
        steps = self.snapshot.samples.steps
        return steps[-1].trained_tokens if steps else 0

    @cached_property
    def tokens(self) -> TokenAccount:
        """Use and loss of generated tokens."""
        return account_tokens(self.snapshot)

    @cached_property
    def tails(self) -> Tails:
        """Distributions of lengths and times."""
        return measure_tails(self.snapshot.trajectories)

    @cached_property
    def stragglers(self) -> Stragglers:
        """Costs of waiting for the last ones."""
        return measure_stragglers(self.snapshot.trajectories, self.snapshot.samples.fleet)

    @cached_property
    def drops(self) -> DropTable:
        """Drops by reason and length."""
        return measure_drops(self.snapshot.trajectories)

    @cached_property
    def dropping(self) -> list[str]:
        """Meaning of the drops, in words."""
        return tell_dropping(self.drops)

    @cached_property
    def staleness(self) -> Staleness | None:
        """Staleness of what was consumed; None before anything was."""
        return measure_staleness(self.snapshot.trajectories)

    @cached_property
    def quality(self) -> Quality:
        """Curves of learning; needs the config."""
        config, samples = self.snapshot.config, self.snapshot.samples
        assert config is not None, f"{self.run}: a report of figures needs the config"
        sizes = fleet_sizes(samples.fleet)
        return measure_quality(config, samples.steps, self.snapshot.history.evaluations, sizes=sizes)

    @property
    def rl_s(self) -> float:
        """Seconds of RL so far."""
        return self.snapshot.samples.rl_s

    @property
    def trained_tokens_per_s(self) -> float:
        """Trained tokens over seconds of RL."""
        return self.trained_tokens / self.rl_s if self.rl_s else 0.0


def read_report(run: Path) -> RunReport:
    """Report of a run folder. Raises `ConfigError` if `run` is none, or nothing has finished in it."""
    if run.is_file():
        raise ConfigError(f"run={run}: is a file; name the folder of a run, e.g. runs/quickstart-1")
    snapshot = read_snapshot(run)
    if not (snapshot.trajectories.finish >= 0).any():
        raise ConfigError(f"run={run}: no trajectory has finished yet, so nothing can be said; wait for one")
    if snapshot.config is None:
        raise ConfigError(f"config={run / 'config.yaml'}: no such file; put the config of the run back there")
    return RunReport(snapshot)
