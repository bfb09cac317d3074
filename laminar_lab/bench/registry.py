"""Measurements by name. `laminar bench relay --only hop` calls `rows` of `laminar_lab/bench/relay/hop.py`.

`MEASUREMENTS` lists them all. A module has `ROWS`, the names of its rows, and `rows`, which measures and returns
the rows; parameters of `rows` of a simple type are the settings that a user may give. The list imports no module
of a measurement (`tests/bench/test_registry.py::test_a_list_of_all_imports_no_heavy_library`).
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from laminar_lab.bench.report import Row, log_line
from laminar_py.config import ConfigError

KINDS = (int, float, str, Path)  # of settings; parameters of other kinds are for tests


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measurement, e.g. `Measurement("relay", "hop", "a hop beside a bare socket")`."""

    benchmark: str
    name: str  # after `--only`
    about: str  # a phrase for the list

    @property
    def module(self) -> ModuleType:
        """Import the module of the measurement; `packer` is a file, and other benchmarks are folders."""
        path = self.name if self.benchmark == self.name else f"{self.benchmark}.{self.name}"
        return import_module(f"{__package__}.{path}")

    @property
    def row_names(self) -> tuple[str, ...]:
        """Names of the rows that the measurement can return."""
        names: tuple[str, ...] = self.module.ROWS
        return names

    def settings(self) -> dict[str, inspect.Parameter]:
        """Return the settings that the measurement takes, by name."""
        parameters = inspect.signature(self.module.rows).parameters
        return {name: parameter for name, parameter in parameters.items() if parameter.annotation in KINDS}

    def measure(self, given: Mapping[str, str]) -> list[Row]:
        """Measure and return the rows. Ignores given settings that the measurement does not take."""
        known = self.settings()
        values = {
            name: _parse_setting(name, text, known[name].annotation)
            for name, text in given.items()
            if name in known
        }
        rows: list[Row] = self.module.rows(**values)
        return rows


MEASUREMENTS = (
    Measurement("control", "fleet", "one controller with 1,024 replicas"),
    Measurement("endpoint", "agents", "agents at the endpoint beside the engine's own stream"),
    Measurement("engine", "local", "the embedded engine beside `generate` of transformers"),
    Measurement("engine", "sglang", "our SGLang client beside a bare HTTP client"),
    Measurement("learner", "agreement", "log-probabilities of the learner beside the engine's"),
    Measurement("learner", "mfu", "model FLOPs utilization of whole steps on a GPU"),
    Measurement("learner", "packing", "packed sequences beside padded sequences"),
    Measurement("ledger", "recording", "the cost of recording a run and of reading the record"),
    Measurement("packer", "packer", "fill, balance over ranks, and the cost of packing a stream"),
    Measurement("plan", "regret", "the planner's first choice beside an exhaustive search"),
    Measurement("relay", "hop", "a hop from a relay to its child beside a bare socket"),
    Measurement("repack", "fleet", "the gain of repacking at the speed of published tables, simulated"),
    Measurement("repack", "schedules", "whole schedules at equal devices, emulated in the real runtime"),
    Measurement("reward", "mathematics", "verifications of mathematical answers"),
    Measurement("reward", "sandbox", "programs in the sandbox"),
    Measurement("segments", "local", "segments beside a plain file and a bare socket"),
    Measurement("turns", "added", "time from an environment's answer to the next turn's first token"),
)


def find(benchmark: str | None = None, only: str | None = None) -> list[Measurement]:
    """Return all measurements, one benchmark's, or a single one. Raises `ConfigError` for an unknown name."""
    benchmarks = dict.fromkeys(known.benchmark for known in MEASUREMENTS)
    if benchmark is not None and benchmark not in benchmarks:
        raise ConfigError(f"{benchmark}: no such benchmark; choose one of {', '.join(benchmarks)}")
    candidates = [known for known in MEASUREMENTS if benchmark in (None, known.benchmark)]
    if only is None:
        return candidates
    chosen = [candidate for candidate in candidates if candidate.name == only]
    if not chosen:
        names = " or ".join(candidate.name for candidate in candidates)
        raise ConfigError(f"--only {only}: no such measurement; choose {names}")
    return chosen


def measure(chosen: Sequence[Measurement], settings: Sequence[str]) -> list[Row]:
    """Return the rows of all measurements that this machine can make, with settings such as `repeats=5`.

    Raises `ConfigError` for a setting that no measurement takes, and where this machine can make none of them.
    """
    given = dict(setting.partition("=")[::2] for setting in settings)
    known = {name for measurement in chosen for name in measurement.settings()} if given else set()
    for name in given:
        if name not in known:
            raise ConfigError(f"{name}: no such setting here; choose {' or '.join(sorted(known)) or 'none'}")
    rows: list[Row] = []
    for measurement in chosen:
        log_line(measurement.name)
        try:
            rows += measurement.measure(given)
        except ConfigError as error:
            if measurement is chosen[-1] and not rows:
                raise
            log_line(f"{measurement.name} is left out: {error}")
    return rows


def _parse_setting(name: str, text: str, kind: type) -> object:
    """Convert a setting to its kind. Raises `ConfigError` unless it is a positive number or a known folder."""
    try:
        value = kind(text)
    except ValueError:
        raise ConfigError(f"{name}={text}: not a number; give one above 0") from None
    if isinstance(value, int | float) and not value > 0:
        raise ConfigError(f"{name}={text}: too small; give a number above 0")
    if isinstance(value, Path) and not value.is_dir():
        raise ConfigError(f"{name}={text}: no such folder; name an existing one")
    return value
