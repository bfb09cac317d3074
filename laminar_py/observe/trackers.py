"""Messages to the processes of trackers, and the figures of a run under flat names for trackers."""

import math
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from laminar_py.config.tracking import Setting
from laminar_py.observe.summary import Summary
from laminar_py.records.events import Evaluated
from laminar_py.records.metrics import StepRow, TokenFigures
from laminar_py.records.scoring import short_terms


class Values(msgspec.Struct, frozen=True, tag=True):
    """Message: call `Tracker.log` with the figures of a step."""

    step: int
    values: dict[str, float]


class Rewound(msgspec.Struct, frozen=True, tag=True):
    """Message: call `Tracker.undo`, since the run went back to `step`."""

    step: int


class Ending(msgspec.Struct, frozen=True, tag=True):
    """Message: call `Tracker.close` with the summary's figures, None if the run has no summary."""

    summary: dict[str, float] | None


Message: TypeAlias = Values | Rewound | Ending


def flat_row(row: StepRow) -> dict[str, float]:
    """Return the numbers of a row of `metrics.jsonl` under the names of docs/metrics.md, e.g. `run/loss`.

    Figures that the step did not measure are left out; NaN stays where training has gone wrong.
    """
    rest = msgspec.to_builtins(row)
    tokens = {name: rest.pop(name) for name in TokenFigures.__struct_fields__}
    ages = {  # MLflow takes no plus sign
        f"staleness_{bucket.replace('+', '_up')}": figures for bucket, figures in rest.pop("by_staleness").items()
    }
    terms = short_terms(rest.pop("reward_terms"))
    groups = {name: rest.pop(name) for name in ("order", "turns", "replay", "drafts")} | {"reward": terms}
    groups["critic"] = rest.pop("critic") or {}
    groups["drafts"] |= {f"speedup_{size}": value for size, value in rest.pop("draft_speedups").items()}
    flat = _numbers({"run": rest, "tokens": tokens, **groups, **ages})
    wrong = row.not_finite
    return {
        name: value for name, value in flat.items() if not math.isnan(value) or name.rpartition("/")[2] in wrong
    }


def flat_evaluation(result: Evaluated) -> dict[str, float]:
    """Return the figures of an evaluation, e.g. `eval/aime/mean`, `eval/aime/pass_at_32`.

    Names have no @, which MLflow refuses. `mean` names accuracies and mean rewards alike, so a set has one curve.
    A term has `eval/aime/reward/math` and `eval/aime/reward/math_pass_at_32`.
    """
    figures = result.figures
    values = {"mean": figures.mean, "truncated": figures.truncated}
    values |= {f"pass_at_{k}": one for k, one in figures.pass_at.items() if k > 1}
    if figures.majority is not None:
        values["majority"] = figures.majority
    numbers: dict[str, float] = {name: one.value for name, one in values.items()}
    numbers |= {"mean_low": figures.mean.low, "mean_high": figures.mean.high}
    numbers |= {"length_p50": figures.length_p50, "length_p95": figures.length_p95}
    for term, found in figures.shown_terms.items():
        numbers[f"reward/{term}"] = found.mean.value
        numbers |= {f"reward/{term}_pass_at_{k}": one.value for k, one in found.pass_at.items() if k > 1}
    numbers |= {"version": result.version, "rl_s": result.rl_s}
    return {f"eval/{result.set_name}/{name}": value for name, value in numbers.items()}


def flat_summary(summary: Summary) -> dict[str, float]:
    """Return the numbers of a summary without its evaluations, e.g. `summary/trajectories/consumed`."""
    return _numbers({"summary": msgspec.to_builtins(summary)})


def flat_settings(tree: Mapping[str, object]) -> dict[str, Setting]:
    """Return the settings of a config under dotted names; leave out null values, turn lists into text."""
    leaves = {name: value for name, value in _leaves(tree, ".").items() if value is not None}
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in leaves.items()
    }


def _numbers(tree: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers in nested mappings as floats, each under its keys joined with slashes."""
    return {name: float(value) for name, value in _leaves(tree, "/").items() if isinstance(value, int | float)}


def _leaves(tree: Mapping[str, object], separator: str) -> dict[str, object]:
    """Return the values of nested mappings, each under its keys joined with `separator`."""
    found: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= {f"{name}{separator}{below}": leaf for below, leaf in _leaves(value, separator).items()}
        else:
            found[name] = value
    return found
