"""A placement as the config of a run. Called by `laminar plan --write`.

A named config keeps its settings beside the placement. Without a config, data and reward are a public math set,
which the user replaces.
"""

import math
from pathlib import Path

import yaml

from laminar_lab.plan.placements import STATIC_SHARE, FleetPlacement, lease_settings, on_new_weights
from laminar_lab.plan.planner import Ranked, RankedPlan
from laminar_lab.plan.request import PlanRequest
from laminar_py.config import ConfigError, parse_config
from laminar_py.config.rollout import Schedule
from laminar_py.records.host import counted

STEPS = 500
HEARTBEAT_S = 60.0

Tree = dict[str, object]
BEGINNING: Tree = {
    "steps": STEPS,
    "data": {
        "train": {"path": "open-r1/DAPO-Math-17k-Processed", "subset": "en", "columns": {"answer": "solution"}},
        "chat": {"texts": True},
    },
    "reward": {"use": ["math"]},
}


def refuse_existing(path: Path | None) -> None:
    """Raise `ConfigError` if a file exists."""
    if path is not None and path.exists():
        raise ConfigError(f"--write={path}: exists already; name another file, or delete it")


def write_config(plan: RankedPlan, ranked: Ranked, path: Path, *, model: Path, base: Tree | None = None) -> None:
    """Write the config of a placement. Raises `ConfigError` if `path` exists, or `base` does not fit."""
    tree = _merged(
        base or {"name": path.stem, **BEGINNING}, placement_settings(plan.request, ranked.placement, model=model)
    )
    parse_config(tree)
    fleet, made = plan.request.fleet, "by formula" if ranked.judgement is None else "simulated"
    head = (
        f"# {plan.request.model} on {counted(fleet.nodes, 'node')} of {fleet.per_node} {fleet.gpu.name}, by"
        f" `laminar plan`: {ranked.tokens_per_s:,.0f} trained tokens/s, {made}.\n"
    )
    refuse_existing(path)
    try:
        path.write_text(head + yaml.safe_dump(tree, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"--write={path}: cannot be written ({error.strerror}); name another file") from None


def placement_settings(request: PlanRequest, place: FleetPlacement, *, model: Path) -> Tree:
    """Return the settings of a placement as a tree."""
    bounded = place.schedule is Schedule.ASYNC
    return {
        "schedule": str(place.schedule),
        "model": {"path": str(model)},
        "rollout": {
            "engine": {
                "kind": "sglang",
                "device": "cuda",
                "tensor_parallel": place.tensor_parallel,
                "flags": {"mem-fraction-static": STATIC_SHARE},
            },
            "replicas": place.replicas,
            "max_batch": place.max_batch,
            "max_len": request.lengths.most,
            "kv_capacity": place.kv_tokens,
            "batch_per_replica": place.batch_per_replica,
            "prompts_per_step": request.prompts_per_step,
            "group_size": request.group_size,
            "sampling": {"max_new_tokens": request.lengths.cap},
            **({"on_new_weights": str(on_new_weights(place, request.learner))} if place.shared else {}),
        },
        "staleness": {"max_staleness": request.max_staleness if bounded else None},
        "packer": {"max_tokens": math.ceil(place.pack_tokens / place.context_parallel)},
        "learner": {
            "world_size": place.learner_gpus,
            "shard_ranks": place.shard_ranks,
            **({"context_parallel": place.context_parallel} if place.context_parallel > 1 else {}),
            "recompute": str(place.recompute),
        },
        "cluster": {"address": "auto" if request.fleet.nodes > 1 else None} | lease_settings(place),
        "supervisor": {"heartbeat_timeout_s": HEARTBEAT_S},
    }


def _merged(below: Tree, above: Tree) -> Tree:
    """Merge two trees; `above` wins. Sections are merged, not replaced."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged
