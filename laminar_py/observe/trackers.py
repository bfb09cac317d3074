"""Messages to trackers, and the figures of a run under the flat names that trackers take."""

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from laminar_py.config.tracking import Setting
from laminar_py.observe.summary import Summary
from laminar_py.records.events import Evaluated
from laminar_py.records.metrics import StepRow, TokenFigures


class Values(msgspec.Struct, frozen=True, tag=True):
    """Message for `Tracker.log`."""

    step: int
    values: dict[str, float]


class Rewound(msgspec.Struct, frozen=True, tag=True):
    """Message for `Tracker.undo`."""

    step: int


class Ending(msgspec.Struct, frozen=True, tag=True):
    """Message for `Tracker.close`."""

    summary: dict[str, float] | None


Message: TypeAlias = Values | Rewound | Ending


def flat_row(row: StepRow) -> dict[str, float]:
    """Return a row of `metrics.jsonl` under the names of docs/metrics.md, e.g. `staleness_3-4/kl_behaviour_k3`."""
    rest = msgspec.to_builtins(row)
    tokens = {name: rest.pop(name) for name in TokenFigures.__struct_fields__}
    ages = {  # MLflow takes no plus sign
        f"staleness_{bucket.replace('+', '_up')}": figures for bucket, figures in rest.pop("by_staleness").items()
    }
    groups = {"order": rest.pop("order"), "reward": rest.pop("reward_terms"), "turns": rest.pop("turns")}
    return _numbers({"run": rest, "tokens": tokens, **groups, **ages})


def flat_evaluation(result: Evaluated) -> dict[str, float]:
    """Return the figures of an evaluation, e.g. `eval/aime/mean`, `eval/aime/pass_at_32` (MLflow takes no @).

    The mean has one name for accuracies and mean rewards, so a set has one curve.
    """
    figures = result.figures
    values = {"mean": figures.mean, "truncated": figures.truncated}
    values |= {f"pass_at_{k}": one for k, one in figures.pass_at.items() if k > 1}
    if figures.majority is not None:
        values["majority"] = figures.majority
    numbers: dict[str, float] = {name: one.value for name, one in values.items()}
    numbers |= {"mean_low": figures.mean.low, "mean_high": figures.mean.high}
    numbers |= {"length_p50": figures.length_p50, "length_p95": figures.length_p95}
    numbers |= {"version": result.version, "rl_s": result.rl_s}
    return {f"eval/{result.set_name}/{name}": value for name, value in numbers.items()}


def flat_summary(summary: Summary) -> dict[str, float]:
    """Return the numbers of a summary without its evaluations, e.g. `summary/trajectories/consumed`."""
    return _numbers({"summary": msgspec.to_builtins(summary)})


def flat_settings(tree: Mapping[str, object]) -> dict[str, Setting]:
    """Return a config with dotted names, without null; a list becomes text."""
    leaves = {name: value for name, value in _leaves(tree, ".").items() if value is not None}
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in leaves.items()
    }


def _numbers(tree: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers of nested mappings, with the names of their path joined by slashes."""
    return {name: float(value) for name, value in _leaves(tree, "/").items() if isinstance(value, int | float)}


def _leaves(tree: Mapping[str, object], separator: str) -> dict[str, object]:
    """Flatten a tree to its leaves, by names joined with `separator`."""
    found: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= {f"{name}{separator}{below}": leaf for below, leaf in _leaves(value, separator).items()}
        else:
            found[name] = value
    return found
