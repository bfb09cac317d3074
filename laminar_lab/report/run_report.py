"""Figures of one reading of a run, and its diagnosis. Every view takes its figures here.

A figure is computed at its first use, so a view computes only the figures that it shows, and all views agree.
"""

from functools import cached_property
from pathlib import Path

from laminar_lab.report.diagnosis import Diagnosis, diagnose
from laminar_lab.report.learning import LearningFinding, learning_findings
from laminar_lab.report.mean_step import mean_step
from laminar_lab.report.pipeline import measure_pipeline
from laminar_lab.report.rates import HostRates, measure_rates
from laminar_lab.report.snapshot import Snapshot, read_snapshot
from laminar_lab.report.tails import Distributions, Staleness, consumed_staleness, measure_staleness, measure_tails
from laminar_lab.report.tokens import TokenAccount, account_tokens
from laminar_py.config.section import ConfigError
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
        """Words about a simulated run and its clock; "" for a real run."""
        starts = (started for _, started in self.snapshot.history.of_kind(RunStarted))
        if not any(started.simulated for started in starts):
            return ""
        config = self.snapshot.config
        emulated = None if config is None else config.rollout.engine.emulates
        speed = 1.0 if emulated is None else emulated.compression
        return f"nothing was generated or trained; a second of its virtual clock is {speed:g} s of the GPUs"

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """Limits of the run; None before the first whole step, or without its config."""
        snapshot, config = self.snapshot, self.snapshot.config
        if config is None:
            return None
        pipeline = measure_pipeline(config, snapshot.trajectories, snapshot.residences, snapshot.history)
        found = mean_step(config, snapshot.trajectories, pipeline, snapshot.samples)
        return None if found is None else diagnose(found, config)

    @cached_property
    def learning(self) -> tuple[LearningFinding, ...]:
        """Findings on how the run learns; none without its config."""
        snapshot = self.snapshot
        if snapshot.config is None:
            return ()
        return learning_findings(snapshot.config, snapshot.trajectories, snapshot.samples.steps)

    @property
    def steps(self) -> int:
        """Number of the last step that was not undone."""
        return max((step.step for _, step in self.snapshot.history.steps), default=0)

    @property
    def rl_s(self) -> float:
        """Seconds of RL so far."""
        return self.snapshot.samples.rl_s

    @property
    def trained_tokens_per_s(self) -> float:
        """Response tokens in learner steps, whatever their weight, over seconds of RL."""
        steps = self.snapshot.samples.steps
        return steps[-1].trained_tokens / self.rl_s if steps and self.rl_s else 0.0

    @cached_property
    def tokens(self) -> TokenAccount:
        """Use and loss of generated tokens."""
        return account_tokens(self.snapshot)

    @cached_property
    def rates(self) -> tuple[HostRates, ...]:
        """Rates of each host, the learner's first; none of a run whose engines are emulated."""
        return measure_rates(self.snapshot)

    @cached_property
    def tails(self) -> Distributions:
        """Distributions of lengths and times."""
        return measure_tails(self.snapshot.trajectories)

    @cached_property
    def staleness(self) -> Staleness | None:
        """Staleness of consumed trajectories; None without any."""
        return measure_staleness(consumed_staleness(self.snapshot.trajectories))

    @cached_property
    def replayed(self) -> Staleness | None:
        """Staleness of replayed trajectories; None without any."""
        return measure_staleness(self.snapshot.replays[:, 1])


def read_report(run: Path) -> RunReport:
    """Read a run. Raises `ConfigError` if `run` is not a run folder, or no trajectory has finished in it."""
    if run.is_file():
        raise ConfigError(f"run={run}: is a file; name the folder of a run, e.g. runs/quickstart-1")
    snapshot = read_snapshot(run)
    if not (snapshot.trajectories.finish >= 0).any():
        raise ConfigError(f"run={run}: no trajectory has finished yet, so there are no figures; wait for one")
    if snapshot.config is None:
        raise ConfigError(f"config={run / 'config.yaml'}: no such file; put the config of the run back there")
    return RunReport(snapshot)
