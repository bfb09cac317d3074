"""Measurements by name: each is a module below this folder that has `ROWS` and one function `rows`.

`bench/relay/hop.py` is the measurement `hop` of the benchmark `relay`; `bench/packer.py` is the only measurement
of `packer`. `ROWS` is a literal with the names of the rows. `rows` measures and returns them; its parameters of a
simple type are the settings that a user may give. A module is imported only when it measures, so a list of all
measurements is cheap (`tests/bench/test_registry.py::test_a_list_of_all_imports_no_heavy_library`).
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from laminar_lab.bench.report import Row, log_line
from laminar_py.config import ConfigError

HERE = Path(__file__).parent
ROWS = re.compile(r'^ROWS = (\((?s:.*?)^\)|".*"$)', re.MULTILINE)  # one string, in parentheses where it is long
KINDS = (int, float, str, Path)  # of settings; parameters of other kinds are for tests


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A measurement, e.g. the one of `laminar bench relay --only hop`."""

    benchmark: str
    name: str
    module: str  # e.g. "laminar_lab.bench.relay.hop"
    about: str  # the first line of its docstring
    row_names: tuple[str, ...]

    def settings(self) -> dict[str, inspect.Parameter]:
        """Import the module and return the settings that the measurement takes."""
        parameters = inspect.signature(import_module(self.module).rows).parameters
        return {name: one for name, one in parameters.items() if one.annotation in KINDS}

    def measure(self, given: Mapping[str, str]) -> list[Row]:
        """Measure and return the rows; of the given settings it uses the ones that it takes."""
        known = self.settings()
        values = {
            name: _value(name, text, known[name].annotation) for name, text in given.items() if name in known
        }
        found: list[Row] = import_module(self.module).rows(**values)
        return found


def find(benchmark: str | None = None, only: str | None = None) -> list[Measurement]:
    """Return all measurements, the ones of a benchmark, or one. Raises `ConfigError` for an unknown name."""
    every = list(_every())
    names = dict.fromkeys(one.benchmark for one in every)
    if benchmark is not None and benchmark not in names:
        raise ConfigError(f"{benchmark}: no such benchmark; choose one of {', '.join(names)}")
    found = [one for one in every if benchmark in (None, one.benchmark)]
    if only is None:
        return found
    chosen = [one for one in found if one.name == only]
    if not chosen:
        raise ConfigError(f"--only {only}: no such measurement; choose {' or '.join(one.name for one in found)}")
    return chosen


def measure(chosen: Sequence[Measurement], settings: Sequence[str]) -> list[Row]:
    """Return the rows of all measurements that this machine can make, with settings such as `repeats=5`.

    Raises `ConfigError` for a setting that no measurement takes, and where this machine can make none of them.
    """
    given = dict(setting.partition("=")[::2] for setting in settings)
    known = {name for one in chosen for name in one.settings()} if given else set()
    for name in given:
        if name not in known:
            raise ConfigError(f"{name}: no such setting here; choose {' or '.join(sorted(known)) or 'none'}")
    found: list[Row] = []
    for one in chosen:
        log_line(one.name)
        try:
            found += one.measure(given)
        except ConfigError as error:
            if one is chosen[-1] and not found:
                raise
            log_line(f"{one.name} is left out: {error}")
    return found


def _every() -> Iterator[Measurement]:
    for path in sorted((*HERE.glob("*.py"), *HERE.glob("*/*.py"))):
        text = path.read_text()
        if rows := ROWS.search(text):
            parts = path.relative_to(HERE).with_suffix("").parts
            yield Measurement(
                benchmark=parts[0],
                name=parts[-1],
                module=".".join((__package__, *parts)),
                about=text.removeprefix('"""').partition("\n")[0].removesuffix('"""'),
                row_names=tuple(word for line in re.findall(r'"(.*)"', rows[0]) for word in line.split()),
            )


def _value(name: str, text: str, kind: type) -> object:
    try:
        value = kind(text)
    except ValueError:
        raise ConfigError(f"{name}={text}: not a number; give one above 0") from None
    if isinstance(value, int | float) and not value > 0:
        raise ConfigError(f"{name}={text}: too small; give a number above 0")
    if isinstance(value, Path) and not value.is_dir():
        raise ConfigError(f"{name}={text}: no such folder; name an existing one")
    return value
