"""Names under which trackers are told numbers and settings. Pure."""

from collections.abc import Mapping

import msgspec

from laminar_py.observe.telemetry.summary import Summary
from laminar_py.observe.telemetry.trackers import Setting
from laminar_py.records.events import Evaluated
from laminar_py.records.metrics import StepRow, TokenFigures


def flat_row(row: StepRow) -> dict[str, float]:
    """A row of `metrics.jsonl` under the names of docs/metrics.md, e.g. `staleness_3-4/kl_behaviour_k3`."""
    values: dict[str, float] = {}
    for name, value in msgspec.to_builtins(row).items():
        if name == "by_staleness":
            for bucket, metrics in value.items():
                place = f"staleness_{bucket.replace('+', '_up')}"  # MLflow takes no plus sign
                values |= {f"{place}/{key}": one for key, one in metrics.items()}
        elif name == "order":
            leaves = _leaves(value, "/").items()
            values |= {f"order/{key}": one for key, one in leaves if isinstance(one, int | float)}
        elif name == "reward_terms":
            values |= {f"reward/{term}": mean for term, mean in value.items()}
        elif name == "turns":
            values |= {f"turns/{key}": one for key, one in value.items()}
        elif value is not None:
            values[f"{_group(name)}{name}"] = value
    return values


def _group(name: str) -> str:
    return "tokens/" if name in TokenFigures.__struct_fields__ else "run/"


def flat_evaluation(result: Evaluated) -> dict[str, float]:
    """Figures of a set, e.g. `eval/aime/mean`, `eval/aime/pass_at_32`; MLflow takes no @.

    The mean has one name whatever the rewards are, so that a curve is one curve.
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
    """Numbers of a summary, e.g. `summary/trajectories/consumed`; evaluations have been told."""
    leaves = _leaves(msgspec.to_builtins(summary), "/")
    return {f"summary/{name}": float(value) for name, value in leaves.items() if isinstance(value, int | float)}


def flat_settings(tree: Mapping[str, object]) -> dict[str, Setting]:
    """A config with dotted names; lists as text, and nothing for what is null."""
    leaves = {name: value for name, value in _leaves(tree, ".").items() if value is not None}
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in leaves.items()
    }


def _leaves(tree: Mapping[str, object], separator: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= {f"{name}{separator}{below}": leaf for below, leaf in _leaves(value, separator).items()}
        else:
            found[name] = value
    return found
