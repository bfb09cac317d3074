"""A profile of this machine: a run's measured engine and learner as YAML, with a comment on the measurement.

Called by `laminar calibrate`. Parts that compute in this process on CPU are measured in CPU seconds, which other
load changes least, and other parts in seconds. `rollout.engine.profile` reads the file
(`tests/calibration/test_profile.py::test_a_profile_that_is_written_is_the_one_that_is_read`).
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, runtime_checkable

import yaml

from laminar_lab.calibration.engine import MeasuredEngine, measure_engine
from laminar_lab.calibration.learner import MeasuredLearner, check, measure_learner
from laminar_lab.emulation.settings import EmulationConfig, EmulationProfile
from laminar_lab.step_time import RESERVE_TOKENS, LinearFit
from laminar_py.config import ConfigError, RunConfig
from laminar_py.config.cluster import Device
from laminar_py.config.engine import BACKENDS, EngineLaunch
from laminar_py.engines import read_sizes
from laminar_py.learner import check_model_folder
from laminar_py.records.host import SystemClock
from laminar_py.rollout import EngineBounds

EMBEDDED = "local"  # the engine that computes in this process
EMBEDDED_RESERVE = 16  # tokens that the embedded engine keeps free for the growth of a request
POOR = 0.2  # mean error from which a fit gets a warning


@runtime_checkable
class Closable(Protocol):
    """An engine with connections to close. Its server process ends with this process, as in a replica."""

    async def close(self) -> None:
        """Close the connections."""
        ...


class CpuClock:
    """Clock of the CPU time of this process and its threads, see `records.host.Clock`."""

    def now(self) -> float:
        """Return CPU seconds; only differences mean anything."""
        return time.process_time()


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile, the fits behind it, and the bytes of a version."""

    profile: EmulationProfile
    engine: LinearFit
    learner: LinearFit
    version_bytes: int

    @property
    def rates(self) -> list[tuple[str, float, float]]:
        """Name, seconds and bytes a second of each measured transfer."""
        engine, learner, relay = self.profile.engine, self.profile.learner, self.profile.relay_bytes_per_s
        assert relay is not None, "calibration measures it"
        seconds = {
            "load, of the share of a GPU": (engine.load_s, self.version_bytes / engine.gpus),
            "publish, while the learner waits": (learner.publish_s, self.version_bytes),
            "publish until another process has verified it": (self.version_bytes / relay, self.version_bytes),
        }
        return [(name, took_s, size / max(took_s, 1e-9)) for name, (took_s, size) in seconds.items()]

    @property
    def warnings(self) -> list[str]:
        """A line for each poor fit."""
        fits = {"engine": self.engine, "learner": self.learner}
        return [
            f"{name}: the fit is off by {fit.mean_error:.0%} on average; measure again with more --repeats, on an"
            " otherwise idle machine"
            for name, fit in fits.items()
            if fit.mean_error > POOR
        ]


def calibrate(config: RunConfig, *, repeats: int, log: Callable[[str], None]) -> Calibration:
    """Measure the learner, then an engine with its weights. Raises `ConfigError`, `EngineLostError`."""
    engine_section = config.rollout.engine
    if isinstance(engine_section, EmulationConfig):
        raise ConfigError(
            f"rollout.engine.profile={engine_section.profile}: emulated engines have their times from the profile;"
            " set rollout.engine.kind=local, or name another config"
        )
    check(config)
    check_model_folder(config.model)
    BACKENDS.get(config.rollout.engine.kind).check_start(config)
    shm = config.relay.shm
    with TemporaryDirectory(prefix="laminar-calibrate-", dir=shm if shm.is_dir() else None) as folder:
        clock = CpuClock() if config.learner_device is Device.CPU else SystemClock()
        learner = measure_learner(config, clock, store=Path(folder), repeats=repeats, log=log)
        engine = asyncio.run(_measure_engine(config, learner, repeats=repeats, log=log))
    profile = EmulationProfile(
        engine=engine.times, learner=learner.times, relay_bytes_per_s=learner.versions.relay_bytes_per_s
    )
    return Calibration(profile, engine.steps, learner.steps, learner.versions.num_bytes)


async def _measure_engine(
    config: RunConfig, learner: MeasuredLearner, *, repeats: int, log: Callable[[str], None]
) -> MeasuredEngine:
    """Start the configured engine, measure its times on the learner's last version, and close it."""
    rollout, section = config.rollout, config.rollout.engine
    is_embedded = section.kind == EMBEDDED
    with TemporaryDirectory(prefix="laminar-calibrate-") as logs:
        launch = EngineLaunch(
            model_dir=config.model.path,
            logs=Path(logs),
            index=0,
            secret=section.secret(),
            server=next(iter(section.servers), ""),
        )
        log("engine: starts")
        engine = await BACKENDS.get(section.kind).open(config, launch)
        bounds = EngineBounds(
            vocab=read_sizes(config.model.path).vocab_size,
            slots=rollout.max_batch,
            max_len=rollout.max_len,
            kv_capacity=engine.status().kv_capacity,
            sampling=rollout.sampling.params(),
        )
        found = await measure_engine(
            engine,
            bounds,
            CpuClock() if is_embedded else SystemClock(),
            weights=learner.weights,
            reserve_tokens=EMBEDDED_RESERVE if is_embedded else RESERVE_TOKENS,
            gpus=max(1, section.gpus),
            repeats=repeats,
            log=log,
        )
        if isinstance(engine, Closable):
            await engine.close()
        return found


def write_profile(found: Calibration, path: Path, *, measured: str) -> None:
    """Write the profile; `measured` names config and machine, e.g. "configs/quickstart.yaml on a CPU"."""
    fits = {"Decode steps": found.engine, "Learner steps": found.learner}
    lines = [
        f"Measured by `laminar calibrate` on {datetime.now(UTC):%Y-%m-%d} (`rollout.engine.profile`): {measured}",
        f"laminar-py {version('laminar-py')}, torch {version('torch')}; load average at the end"
        f" {os.getloadavg()[0]:.1f}",
        *(
            f"{name}: {len(fit.observations)} sizes, error of the fit {fit.mean_error:.1%}, at most"
            f" {fit.worst_error:.1%}"
            for name, fit in fits.items()
        ),
        "`reserve_tokens` is not measured.",
    ]
    write_with_comment(found.profile, path, lines)


def write_with_comment(profile: EmulationProfile, path: Path, lines: Sequence[str]) -> None:
    """Write a profile below lines of comment; a field that was not measured is left out."""
    comment = "".join(f"# {line}\n" for line in lines)
    path.write_text(comment + yaml.safe_dump(_rounded(profile.model_dump(exclude_none=True)), sort_keys=False))


def refuse_unwritable(out: Path) -> None:
    """Raise `ConfigError` where no profile can be written."""
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(f"--out {out}: cannot be written; name a file in an existing folder")


def _rounded(value: object) -> object:
    """Round measured times to four digits; more digits are noise."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
