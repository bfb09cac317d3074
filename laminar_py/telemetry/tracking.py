"""Names under which trackers are told numbers and settings. Pure."""

from collections.abc import Mapping

import msgspec

from laminar_py.records.metrics import StepRow, TokenFigures
from laminar_py.telemetry.summary import Summary
from laminar_py.telemetry.trackers import Setting


def flat_row(row: StepRow) -> dict[str, float]:
    """A row of `metrics.jsonl` under the names of docs/metrics.md, e.g. `staleness_3-4/kl_behaviour_k3`."""
    values: dict[str, float] = {}
    for name, value in msgspec.to_builtins(row).items():
        if name == "by_staleness":
            for bucket, metrics in value.items():
                place = f"staleness_{bucket.replace('+', '_up')}"  # MLflow takes no plus sign
                values |= {f"{place}/{key}": one for key, one in metrics.items()}
        elif name == "reward_terms":
            values |= {f"reward/{term}": mean for term, mean in value.items()}
        elif value is not None:
            values[f"{_group(name)}{name}"] = value
    return values


def _group(name: str) -> str:
    return "tokens/" if name in TokenFigures.__struct_fields__ else "run/"


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
