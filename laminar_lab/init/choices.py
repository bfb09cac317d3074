"""From a user's choices to the settings of a run: the smallest config that runs, for this machine or for GPUs.

A machine's cores get the embedded engine, or SGLang's servers for CPUs, as many as its memory holds by the
formulas of `laminar doctor`. GPUs are placed by the formulas of `laminar plan`. Settings that a foreign file gave
are kept, and the others are made to fit them.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from laminar_lab.doctor.cpu_memory import CPU_ACTIVATIONS
from laminar_lab.doctor.gpu_formula import engine_memory, learner_memory, with_spare
from laminar_lab.doctor.memory import host_memory
from laminar_lab.gpus import read_group
from laminar_lab.model_shape import ModelShape, kv_token_bytes
from laminar_lab.plan.inputs import MAX_STALENESS
from laminar_lab.plan.known_models import model_named, named_folder
from laminar_lab.plan.planner import plan_by_formula
from laminar_lab.plan.request import GpuFleet, Lengths, PlanRequest
from laminar_lab.plan.writing import placement_settings
from laminar_py.config import ConfigError, parse_config
from laminar_py.config.learner import LearnerConfig, LoraConfig
from laminar_py.config.loading import flatten
from laminar_py.config.rollout import Schedule

HERE = "here"  # in place of GPUs
STEPS, EVERY_STEPS = 200, 20
PROMPT_TOKENS = 1024  # where no tokenizer counts them
ROUND = 64  # tokens
MOST_RUNNING = 64  # responses of an engine on CPUs
PACK_TOKENS = 512  # of a microbatch on CPUs: more would take memory and no less time
USUAL = ("schedule", "cluster.address", "learner.recompute", "learner.shard_ranks", "learner.context_parallel")
"""Settings that need no line where they have their defaults."""
KV_BYTES = 2e9  # of an engine on CPUs
CORES_A_REPLICA = 4
LARGE = 7e9  # parameters that learn with LARGE_LR
LARGE_LR = 1e-6
LORA_SIZE, LORA_LR = 135e6, 1.5e-4  # parameters, and the rate of their adapters, as experiments/smollm2 measured
P50, P99_OVER_P50 = 1500.0, 10.0  # tokens of a response on GPUs, as `laminar plan` assumes

Settings = dict[str, object]
"""Values by dotted name."""
_SMALLEST = {"name": "a", "steps": 1, "model": {"path": "m"}, "data": {"train": "d"}, "reward": {"use": ["math"]}}
_DEFAULTS = flatten(parse_config(_SMALLEST))


class Engine(StrEnum):
    """Engines that `laminar init` offers."""

    EMBEDDED = "embedded"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Answers of a user, e.g. `Choices(model="models/SmolLM2-135M", data="train.jsonl", on="here", lora=True)`."""

    name: str = "mine"
    model: str  # a folder; on GPUs also a known name or a size such as 7B
    data: str
    heldout: str | None = None
    reward: str = "math"  # terms, with commas between them
    lora: bool = False
    on: str = HERE  # or GPUs, e.g. 8xH100
    engine: Engine = Engine.EMBEDDED
    python: str | None = None  # with SGLang, where it has an environment of its own
    given: Mapping[str, object] = field(default_factory=dict)  # settings of a foreign file

    @property
    def folder(self) -> Path:
        """Folder of the model; a known model that is missing gets `models/<name>`."""
        return named_folder(self.model)

    def number(self, key: str, default: int) -> int:
        """Return a whole number that the foreign file gave, else `default`."""
        return int(str(self.given.get(key, default)))


def check_place(choices: Choices) -> None:
    """Raise `ConfigError` for an engine that cannot run at the chosen place, or a folder that is not there."""
    if choices.on != HERE and choices.engine is Engine.EMBEDDED:
        raise ConfigError(f"--engine=embedded: computes on CPUs, and --on={choices.on} names GPUs; choose sglang")
    if choices.on != HERE:
        fleet_of(choices.on)
        model_named(choices.model)
    elif not (Path(choices.model) / "config.json").is_file():
        raise ConfigError(f"--model={choices.model}: no config.json in it; name a model folder, or GPUs by --on")
    if choices.lora and model_named(choices.model)[1].experts:
        raise ConfigError(f"--lora: {choices.model} is a mixture of experts, which has no adapters; choose --full")
    if choices.on == HERE and choices.engine is Engine.SGLANG and not (choices.python or find_spec("sglang")):
        raise ConfigError("--engine=sglang: sglang is not installed here; name its interpreter by --sglang-python")


def fleet_of(on: str) -> GpuFleet:
    """Read GPUs such as `8xH100`, or nodes of them such as `3x8xH100`. Raises `ConfigError`."""
    try:
        group = read_group(on if on.count("x") > 1 else f"1x{on}", option="--on")
    except ConfigError:
        group = None
    if group is None or group.gpu is None:
        raise ConfigError(f"--on={on}: neither here nor GPUs that are known; write e.g. 8xH100")
    return GpuFleet(gpu=group.gpu, nodes=group.nodes, per_node=group.each)


def settings_of(choices: Choices, *, prompt_tokens: int | None) -> Settings:
    """Return the settings of a run; `prompt_tokens` is the longest prompt, None where it is unknown.

    Raises `ConfigError` if GPUs cannot hold the model.
    """
    _, shape = model_named(choices.model)
    placed = _on_cores if choices.on == HERE else _on_gpus
    task, longest = _task(choices, shape), max(prompt_tokens or _prompt_room(choices), 1)
    others = {
        key: value for key, value in choices.given.items() if key not in task and value != _DEFAULTS.get(key)
    }
    settings = others | task | placed(choices, shape, longest)
    for key in USUAL:
        if key in settings and settings[key] == _DEFAULTS[key]:
            del settings[key]
    if "eval.sets" in settings:
        settings.setdefault("eval.every_steps", EVERY_STEPS)
    return settings


def _prompt_room(choices: Choices) -> int:
    """Return the longest prompt that a foreign file allows."""
    most = choices.number("rollout.max_len", 0) - choices.number("rollout.sampling.max_new_tokens", 0)
    return most if most > 0 else PROMPT_TOKENS


def _task(choices: Choices, shape: ModelShape) -> Settings:
    """Return the settings that do not depend on the machine."""
    adapters: Settings = {"learner.lora.rank": LoraConfig().rank} if choices.lora else {}
    sets: Settings = {} if choices.heldout is None else {"eval.sets": {"heldout": choices.heldout}}
    task: Settings = {
        "name": choices.name,
        "steps": STEPS,
        "model.path": str(choices.folder),
        "data.train": choices.data,
        "reward.use": choices.reward.split(","),
        "learner.lr": learning_rate(shape.total, lora=choices.lora),
        "learner.checkpoint_every": EVERY_STEPS,
        **adapters,
        **sets,
    }
    return task | {key: value for key, value in choices.given.items() if key in task}


def learning_rate(parameters: int, *, lora: bool) -> float:
    """Return a usual learning rate, more for fewer parameters.

    At 7 billion parameters it is 1e-6, and for adapters 2.1e-5.
    """
    size, rate = (LORA_SIZE, LORA_LR) if lora else (LARGE, LARGE_LR)
    return float(f"{min(rate * math.sqrt(size / max(parameters, 1)), 1e-3):.1e}")


def _lengths(choices: Choices, longest: int, cap: int) -> tuple[int, int]:
    """Return the cap on responses and the most tokens of a trajectory, whose prompt has `longest`."""
    cap = choices.number("rollout.sampling.max_new_tokens", cap)
    whole = -(-(longest + cap) // ROUND) * ROUND
    return cap, max(whole, choices.number("rollout.max_len", 0))


def _on_cores(choices: Choices, shape: ModelShape, longest: int) -> Settings:
    """Return the settings of engines and a learner on this machine's cores."""
    cap, most = _lengths(choices, longest, cap=256)
    group = choices.number("rollout.group_size", 8)
    fitting = int(KV_BYTES // (kv_token_bytes(shape, 1, width=4.0) * most))
    running = max(group, min(MOST_RUNNING, fitting))
    packed = max(most, choices.number("packer.max_tokens", PACK_TOKENS))
    engine: Settings = {"rollout.engine.kind": "local"}
    if choices.engine is Engine.SGLANG:
        engine = {"rollout.engine.kind": "sglang", "rollout.engine.device": "cpu"}
        engine |= {} if choices.python is None else {"rollout.engine.python": choices.python}
    return engine | {
        "rollout.replicas": _replicas_here(choices, shape, kv_tokens=running * most, microbatch=packed),
        "rollout.max_batch": running,
        "rollout.max_len": most,
        "rollout.prompts_per_step": choices.number("rollout.prompts_per_step", 8),
        "rollout.group_size": group,
        "rollout.sampling.max_new_tokens": cap,
        "packer.max_tokens": packed,
        "relay.nodes": 1,
        "staleness.max_staleness": MAX_STALENESS,
    }


def _replicas_here(choices: Choices, shape: ModelShape, *, kv_tokens: int, microbatch: int) -> int:
    """Return the engines that this machine's cores and memory have room for, beside the learner.

    Raises `ConfigError` if its memory cannot hold one.
    """
    memory = host_memory()
    learner = with_spare(learner_memory(shape, _learner(choices), tokens=microbatch), memory)
    learner["activations"] *= CPU_ACTIVATIONS
    engine = engine_memory(shape, gpus=1, kv_tokens=kv_tokens, static_bytes=0, gpu_bytes=0, width=4.0)
    beside, each = sum(learner.values()), sum(engine.values())
    fitting = int((memory - beside) / each)
    if fitting < 1:
        smaller = "a smaller model" if choices.lora else "--lora, a smaller model"
        raise ConfigError(
            f"--model={choices.model}: learner and engine need {(beside + each) / 1e9:.1f} GB by formula, and this"
            f" machine has {memory / 1e9:.1f}; choose {smaller}, or GPUs by --on"
        )
    return max(1, min(fitting, len(os.sched_getaffinity(0)) // CORES_A_REPLICA))


def _learner(choices: Choices) -> LearnerConfig:
    return LearnerConfig(lora=LoraConfig() if choices.lora else None)


def _on_gpus(choices: Choices, shape: ModelShape, longest: int) -> Settings:
    """Return the settings of the placement that the formulas of `laminar plan` find best."""
    cap, _ = _lengths(choices, longest, cap=4096)
    p50 = min(P50, cap / 4)
    request = PlanRequest(
        model=choices.model,
        shape=shape,
        fleet=fleet_of(choices.on),
        lengths=Lengths.of_percentiles(p50, P99_OVER_P50 * p50, cap=cap, prompt=longest),
        prompts_per_step=choices.number("rollout.prompts_per_step", 64),
        group_size=choices.number("rollout.group_size", 8),
        max_staleness=MAX_STALENESS,
        learner=_learner(choices),
    )
    ranked = plan_by_formula(request).ranked
    found = [one.placement for one in ranked if one.placement.schedule is Schedule.ASYNC]
    # settings of a foreign file may need more of a learner's GPU than the plan left beside a shared engine
    best = next((one for one in found if not one.shared), found[0])
    placed = dict(_flat(placement_settings(request, best, model=choices.folder)))
    if choices.python is not None:
        placed["rollout.engine.python"] = choices.python
    return placed | ({"relay.nodes": 1} if request.fleet.nodes == 1 else {})


def _flat(tree: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    """Return leaves by dotted name; the flags of an engine are one leaf."""
    leaves: list[tuple[str, object]] = []
    for name, value in tree.items():
        if isinstance(value, dict) and name != "flags":
            leaves += _flat(value, f"{prefix}{name}.")
        else:
            leaves.append((f"{prefix}{name}", value))
    return leaves
