"""The file of an experiment, its variants and its runs, and the comparison with existing run folders.

`laminar launch` calls this module before it starts a run. A run starts from a file with all of its settings, so a
later change of the base has no effect on the run.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from laminar_py.config import ConfigError, Count, RunConfig, Section, load_config
from laminar_py.config.loading import RESETTING, dump_config, flatten, load_settings, read_tree, to_overrides
from laminar_py.ledger import RunFolder, newest_run, read_events, reading, runs_of
from laminar_py.records.events import RunStarted

HELP_AT = "docs/launch.md"
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
OWN_KEYS = {"name": "name", "seed": "seeds", "runs": "the folder of the file"}  # setting -> where it comes from
MOST_SEEDS = 1000  # a larger `seeds` is a seed by mistake, e.g. 20260101
MOST_NAME = 200  # characters; files are named after runs, with an ending, and a file name has at most 255
UNTELLING = ("name", "kind")  # last words of keys that mean nothing without their section
ONLY_VARIANT = "base"  # its name, if an experiment has neither `grid` nor `variants`

Settings = dict[str, Any]
"""Values by the keys of settings, e.g. `{"learner.lr": 1e-3}`."""


def list_seeds(given: Any) -> Any:
    """Turn a number of seeds into a list; return a list unchanged. Raises `ConfigError` for an unusable number."""
    if not isinstance(given, int):
        return given
    if isinstance(given, bool) or not 0 < given <= MOST_SEEDS:
        raise ConfigError(f"is no number of seeds from 1 to {MOST_SEEDS}; list a seed itself as [{int(given)}]")
    return list(range(given))


class VariantSettings(Section):
    """A named variant, e.g. `{name: slow, set: {learner.lr: 1e-4}}`."""

    name: str = Field(pattern=NAME)
    """Part of the run names."""
    set: Settings = {}  # noqa: RUF012 - pydantic copies it
    """Settings of this variant, over the settings of `set` and `base`."""


class ExperimentSettings(Section):
    """The file of `laminar launch`."""

    name: str = Field(pattern=NAME)
    """Runs are named `<name>-<variant>-s<seed>`."""
    base: Path
    """Config of a run; like all paths, relative to the working directory."""
    set: Settings = {}  # noqa: RUF012
    """Settings of all runs, over the settings of `base`."""
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}  # noqa: RUF012
    """Values to try by setting, e.g. `{learner.lr: [1e-3, 3e-3]}`; every combination is a variant."""
    variants: tuple[VariantSettings, ...] = ()
    """Variants with names of their own, instead of a grid."""
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(list_seeds)] = [0]  # noqa: RUF012
    """Seeds of each variant: their number, counted from 0, or a list."""
    parallel: Count | None = None
    """Runs side by side; default: as many as the host has GPUs for, or 1 if runs need no GPU."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse a grid beside variants, settings that the experiment decides itself, and repeated seeds."""
        if self.grid and self.variants:
            raise ConfigError(f"grid={', '.join(self.grid)}: variants are given too; keep one of the two")
        for where, keys in (("set", self.set), ("grid", self.grid), *((v.name, v.set) for v in self.variants)):
            for key in keys:
                if key in OWN_KEYS:
                    raise ConfigError(
                        f"{where}.{key}={keys[key]}: an experiment decides that by {OWN_KEYS[key]}; leave it out"
                    )
        if len({*self.seeds}) != len(self.seeds) or not self.seeds:
            raise ConfigError(f"seeds={self.seeds}: must be different numbers; list each once, or say how many")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run of an experiment, e.g. `sweep-lr-0.001-s2`."""

    name: str
    variant: str
    seed: int
    overrides: tuple[str, ...]  # without name, seed and runs
    config: RunConfig

    @property
    def log(self) -> Path:
        """File with the output of the run's processes."""
        return self.config.runs / f"{self.name}.log"

    @property
    def folder(self) -> RunFolder | None:
        """Newest folder of the run; None before the first start."""
        try:
            return newest_run(self.config)
        except ConfigError:
            return None

    @property
    def file(self) -> Path:
        """File with all settings of the run; the run starts from this file."""
        return self.config.runs / f"{self.name}.yaml"

    def write_config(self) -> None:
        """Write all settings of the run to `file`."""
        self.file.write_text(dump_config(self.config))

    @property
    def arguments(self) -> list[str]:
        """Arguments of `laminar train` that start the run."""
        return [str(self.file), *to_overrides(_own(self.name, self.seed, self.config.runs))]


@dataclass(frozen=True)
class Experiment:
    """The runs of a file in starting order: the first seed of every variant comes before second seeds."""

    file: Path
    settings: ExperimentSettings
    runs: tuple[PlannedRun, ...]

    @property
    def folder(self) -> Path:
        """Folder of the file and of all runs."""
        return self.file.parent

    @property
    def lock(self) -> Path:
        """File that a launcher of this experiment locks."""
        return self.folder / "runs" / f"{self.settings.name}.lock"

    @property
    def compared(self) -> str:
        """The first evaluation set, whose results the table shows; "evaluation" if the config has no set."""
        return next(iter(self.runs[0].config.eval.sets), "evaluation")

    @cached_property
    def variants(self) -> list[str]:
        """Names of the variants, in the order of the file."""
        return list(dict.fromkeys(run.variant for run in self.runs))


def read_experiment(file: Path) -> Experiment:
    """Read the YAML file of an experiment. Raises `ConfigError` for a mistake in the file or in a run's config."""
    settings = load_settings(ExperimentSettings, file, [], help_at=HELP_AT)
    runs = file.parent / "runs"
    base = f"base={settings.base}"
    _load(settings.base, base, [])
    _check_sections(settings)
    _load(settings.base, base, to_overrides(settings.set))
    planned = []
    for seed, (variant, changes) in itertools.product(settings.seeds, _variants(settings)):
        name = f"{settings.name}-{variant}-s{seed}"
        if len(name) > MOST_NAME:
            raise ConfigError(
                f"name={name[:40]}...: this run's name has {len(name)} characters, and {MOST_NAME} are the most;"
                " shorten the experiment's name, or list variants with short names"
            )
        overrides = to_overrides(settings.set | changes)
        config = _load(settings.base, f"variant {variant}", [*overrides, *to_overrides(_own(name, seed, runs))])
        planned.append(
            PlannedRun(name=name, variant=variant, seed=seed, overrides=tuple(overrides), config=config)
        )
    return Experiment(file, settings, tuple(planned))


def _own(name: str, seed: int, runs: Path) -> Settings:
    return {"name": name, "seed": seed, "runs": str(runs)}


def _load(base: Path, what: str, overrides: list[str]) -> RunConfig:
    try:
        return load_config(base, overrides)
    except ConfigError as error:
        told = str(error).removeprefix(f"config={base}: ")
        raise ConfigError(f"{what}: {told}") from None


def _check_sections(settings: ExperimentSettings) -> None:
    """Raise `ConfigError` for a section given as a value, which would silently drop other settings of the base."""
    base = read_tree(settings.base, [])
    given = [("set", settings.set), *((variant.name, variant.set) for variant in settings.variants)]
    given += [("grid", {key: value}) for key, values in settings.grid.items() for value in values]
    for where, key, value in ((where, key, value) for where, own in given for key, value in own.items()):
        said = _value_at_key(base, key)
        if not _is_section(key) or not isinstance(value, dict) or not isinstance(said, dict):
            continue
        lost = sorted({*said} - {*value})
        if lost:
            raise ConfigError(
                f"{where}.{key}={value}: would drop {key}.{lost[0]}, which {settings.base} sets; name each setting"
                f" by its whole key, as {key}.{next(iter(value), lost[0])}"
            )


def _value_at_key(tree: object, key: str) -> object:
    """Return the value at a dotted key in plain data, or None."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _is_section(key: str) -> bool:
    """Return whether a dotted key names a section of a run's config. Tables with free names are values."""
    kind: Any = RunConfig
    for name in key.split("."):
        field = kind.model_fields.get(name) if kind else None
        told = field.annotation if field else None
        kinds = get_args(told) if isinstance(told, UnionType) else (told,)
        kind = next((one for one in kinds if isinstance(one, type) and issubclass(one, Section)), None)
    return kind is not None


def _variants(settings: ExperimentSettings) -> list[tuple[str, Settings]]:
    """Return the name and settings of each variant. Raises `ConfigError` if two variants share a name."""
    if settings.grid:
        rows = itertools.product(*([(key, value) for value in values] for key, values in settings.grid.items()))
        found = [(_grid_name(dict(row)), dict(row)) for row in rows]
    else:
        found = [(variant.name, variant.set) for variant in settings.variants] or [(ONLY_VARIANT, {})]
    name, count = Counter(name for name, _ in found).most_common(1)[0]
    if count > 1:
        field = "grid" if settings.grid else "variants"
        raise ConfigError(f"{field}={name}: {count} variants have this name; list variants with own names")
    return found


def _grid_name(values: Settings) -> str:
    """Return the name of a grid point, e.g. `lr-0.001_algorithm-dapo`; keys with equal last words stay whole."""
    ends = {key: _end(key) for key in values}
    counts, parts = Counter(ends.values()), []
    for key, value in values.items():
        told = value if isinstance(value, str) else json.dumps(value)
        parts.append(f"{ends[key] if counts[ends[key]] == 1 else key}-{told}")
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", "_".join(parts)).strip("-._")


def _end(key: str) -> str:
    """Return the telling part of a key: "lr" of `learner.lr`, "algorithm" of `algorithm.name`."""
    *sections, end = key.split(".")
    return sections[-1] if sections and end in UNTELLING else end


def check_existing_runs(experiment: Experiment) -> list[str]:
    """Return a line for each run that a resume by hand gave other settings, with which the run continues.

    Raises `ConfigError` for a run with two folders, or with a folder of other settings than the file has.
    """
    lines = []
    for run in experiment.runs:
        try:
            begun = [folder for folder in runs_of(run.config) if folder.has_ledger]
        except OSError as error:
            raise ConfigError(
                f"{run.config.runs}: the folder of {run.name} cannot be read ({error}); launch as its owner"
            ) from None
        if len(begun) > 1:
            raise ConfigError(
                f"{run.name}: {begun[0].path} and {begun[1].path.name} are both folders of this run; move one"
                " of them elsewhere"
            )
        for folder in begun:
            changes = _changes_by_hand(folder)
            if difference := _find_difference(run, folder, besides=[*OWN_KEYS, *changes]):
                raise ConfigError(
                    f"{difference}; set the old value to continue the run, or give the experiment another name"
                )
            if changes:
                kept = " ".join(changes.values())
                lines.append(f"{run.name}: a resume by hand changed {kept}; the run continues with that")
    return lines


def _changes_by_hand(folder: RunFolder) -> dict[str, str]:
    """Return the last override of each setting that resumes of a run changed, by key.

    The overrides of a resume that ended before its learner started are not in the run's `config.yaml`, and do not
    count.
    """
    with reading(folder.ledger) as connection:
        given = [override for started in read_events(connection, RunStarted) for override in started.overrides]
    changes = {override.partition("=")[0]: override for override in given if _is_in_effect(override, folder)}
    return {key: override for key, override in changes.items() if key not in OWN_KEYS}


def _is_in_effect(override: str, folder: RunFolder) -> bool:
    """Return whether a run's `config.yaml` has the value of an override; True if nobody can tell."""
    key = override.partition("=")[0]
    try:
        now, then = (flatten(load_config(folder.config, given)) for given in ([], [override]))
    except ConfigError:  # it needs others beside it
        return True
    return all(now.get(each) == then.get(each) for each in {*now, *then} if f"{each}.".startswith(f"{key}."))


def _find_difference(run: PlannedRun, folder: RunFolder, *, besides: Sequence[str]) -> str:
    """Describe the first setting in which a run's folder differs from the file; "" without a difference.

    Settings and sections of `besides` may differ. Raises `ConfigError` if the config in the folder cannot be read.
    """
    try:
        before = flatten(load_config(folder.config, []))
    except ConfigError as error:
        raise ConfigError(f"{folder.config}: {error}") from None
    now = flatten(run.config)
    free = tuple(f"{key.rpartition('.')[0] if key in RESETTING else key}." for key in besides)
    differing = (key for key in sorted({*before, *now}) if before.get(key) != now.get(key))
    key = next((key for key in differing if not f"{key}.".startswith(free)), None)
    return "" if key is None else f"{key}={now.get(key)}: {folder.path} was made with {before.get(key)}"
