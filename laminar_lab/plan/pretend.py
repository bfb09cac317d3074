"""A config whose engines compute, as a simulated run on GPUs that are not here, for `laminar simulate --gpu`."""

import math

from laminar_lab.emulation.settings import EmulationProfile
from laminar_lab.gpus import Gpu
from laminar_lab.plan.known_models import model_named
from laminar_lab.plan.request import GpuFleet, Lengths, PlanRequest
from laminar_py.config import ConfigError, RunConfig, parse_config

PER_NODE = 8  # GPUs


def pretend(config: RunConfig, gpu: Gpu, lengths: Lengths) -> tuple[RunConfig, EmulationProfile]:
    """Return the config with emulated engines and learner of the same size, and the times of `gpu` for its model.

    Evaluations, the warm start, a cap on a response's time and what experts did are left out. Raises `ConfigError`
    where the config has an environment, whose times nobody knows.
    """
    engine, learner = config.rollout.engine, config.learner
    if config.environment is not None:
        raise ConfigError(
            "environment: a simulation does not know its times; leave it out with environment=null, or describe"
            " its turns by rollout.engine.kind=emulated and rollout.engine.turns"
        )
    if engine.emulates is not None:
        raise ConfigError(f"rollout.engine.kind={engine.kind}: has times of its own; leave out --gpu")
    name, shape = model_named(str(config.model.path))
    request = PlanRequest(
        model=name,
        shape=shape,
        fleet=GpuFleet(gpu=gpu, nodes=math.ceil(config.gpus / PER_NODE), per_node=PER_NODE),
        lengths=lengths,
        prompts_per_step=config.rollout.prompts_per_step,
        group_size=config.rollout.group_size,
        learner=learner,
    )
    tree = config.model_dump(mode="json")
    tree["rollout"]["engine"] = request.emulated_engine(learner_devices=learner.world_size)
    tree["rollout"]["max_seconds"] = None
    del tree["rollout"]["record"]
    tree["learner"] |= {"world_size": 1, "lora": None}
    tree["eval"]["sets"], tree["warm_start"] = {}, None
    return parse_config(tree), request.profile(max(1, engine.gpus))
