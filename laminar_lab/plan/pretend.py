"""A config whose engines compute, as a simulated run on GPUs that are not here, for `laminar simulate --gpu`."""

import math
from dataclasses import replace

from laminar_lab.doctor.memory import memory_faults
from laminar_lab.emulation.settings import EmulationProfile
from laminar_lab.gpus import Gpu
from laminar_lab.model_shape import ModelShape
from laminar_lab.plan.known_models import model_named
from laminar_lab.plan.placements import MOST_CACHED, FleetPlacement
from laminar_lab.plan.request import GpuFleet, Lengths, PlanRequest
from laminar_lab.step_time import LEARNER_MFU, with_passes
from laminar_py.config import ConfigError, RunConfig, parse_config
from laminar_py.config.algorithm import Advantage, AlgorithmConfig, Proximal, ReferencePass
from laminar_py.config.cluster import LeaseCache
from laminar_py.config.learner import Recompute
from laminar_py.config.rollout import WithoutSignal

PER_NODE = 8  # GPUs
PROMPT = 400  # tokens, unless the config has less room


def pretend(
    config: RunConfig,
    gpu: Gpu,
    *,
    p50: float | None = None,
    p99: float | None = None,
    prompt: int | None = None,
    measured: EmulationProfile | None = None,
) -> tuple[RunConfig, EmulationProfile]:
    """Return the config with emulated engines and learner of the same size, and the times of `gpu` for its model.

    `p50`, `p99` and `prompt` are tokens of responses and prompts. A `measured` profile replaces the computed
    times. Evaluations, the warm start and records of experts are left out, and so are the settings that `ignored`
    names. Raises `ConfigError` for an environment, whose times nobody knows, for a model that does not fit, and
    for a profile of other replicas.
    """
    engine, learner = config.rollout.engine, config.learner
    if config.environment is not None:
        raise ConfigError(
            "environment: a simulation does not know its times; leave it out with environment=null, or describe"
            " its turns by rollout.engine.kind=emulated and rollout.engine.turns"
        )
    if engine.emulates is not None:
        raise ConfigError(f"rollout.engine.kind={engine.kind}: has times of its own; leave out --gpu")
    request = request_of(config, gpu, p50=p50, p99=p99, prompt=prompt, measured=measured)
    _check_replicas(engine.gpus, request.model, request.shape, measured)
    if faults := memory_faults(config, gpu_bytes=gpu.memory_bytes):
        raise ConfigError(faults[0])
    tree = config.model_dump(mode="json")
    # ranks that share rows are one device of their joint speed
    devices = {"engine_devices": max(1, engine.gpus)}
    tree["rollout"]["engine"] = request.emulated_engine(learner_devices=learner.num_rows) | devices
    tree["cluster"]["learner_device"] = None
    tree["cluster"]["lease"]["cache"] = str(config.lease_cache)
    del tree["rollout"]["record"]
    tree["packer"]["max_tokens"] = config.row_tokens
    tree["learner"] |= {"world_size": 1, "context_parallel": 1, "lora": None}
    tree["eval"]["sets"], tree["warm_start"] = {}, None
    tree["algorithm"] |= _without_stages(config.algorithm)
    if config.algorithm.trains_on_all_groups:  # also without its teacher
        tree["rollout"]["without_signal"] = WithoutSignal.TRAIN.value
    return parse_config(tree), _profile_of(config, request)


def _profile_of(config: RunConfig, request: PlanRequest) -> EmulationProfile:
    """Return the times of a config's replicas and learner, with every pass of its loss and the critic's work."""
    algorithm, learner = config.algorithm, config.learner
    profile = replace(request, has_critic=False).profile(max(1, config.rollout.engine.gpus))
    timed = with_passes(
        profile.learner,
        updates=algorithm.updates_per_step,
        reference=algorithm.has_reference and not algorithm.reference_in_own_process,
        proximal=algorithm.proximal is Proximal.RECOMPUTE,
        critic=request.has_critic,
    )
    speed = timed.train_tokens_per_s * learner.context_parallel
    timed = timed.model_copy(update={"train_tokens_per_s": speed})
    return profile.model_copy(update={"learner": timed})


def _without_stages(algorithm: AlgorithmConfig) -> dict[str, object]:
    """Return changes to a loss that leave out stages; a step with an advantage takes as long without a teacher."""
    changes: dict[str, object] = {"reference_pass": ReferencePass.LEARNER.value}
    if algorithm.teacher is not None:
        changes |= {"teacher": None, "teacher_coef": 0.0}
        if algorithm.advantage is Advantage.NONE:
            changes["advantage"] = Advantage.GROUP_STD.value
    return changes


def ignored(config: RunConfig) -> str:
    """Return a line that names the settings whose time a pretended run leaves out; "" if there are none."""
    algorithm, recompute = config.algorithm, config.learner.recompute
    found = []
    if recompute is not Recompute.NONE:
        found.append(f"learner.recompute={recompute} (its work is part of the assumed MFU of {LEARNER_MFU:g})")
    if config.learner.offload:
        found.append("learner.offload (AdamW runs on the host)")
    if algorithm.reference_in_own_process:
        found.append("algorithm.reference_pass=stage (its GPU is assumed to keep up)")
    if algorithm.teacher is not None:
        found.append("algorithm.teacher (it is assumed to keep up)")
    if config.learner.context_parallel > 1:
        found.append("learner.context_parallel (its exchanges around attention, as other collectives)")
    return f"not in the times: {', '.join(found)}" if found else ""


def request_of(
    config: RunConfig,
    gpu: Gpu,
    *,
    p50: float | None = None,
    p99: float | None = None,
    prompt: int | None = None,
    measured: EmulationProfile | None = None,
) -> PlanRequest:
    """Return the request for a plan of a config on as many of `gpu` as it has. The arguments are `pretend`'s."""
    rollout, gpus = config.rollout, max(1, config.gpus)
    name, shape = model_named(str(config.model.path))
    cap = rollout.sampling.max_new_tokens
    prompt = min(PROMPT, rollout.max_len - cap) if prompt is None else prompt
    return PlanRequest(
        model=name,
        shape=shape,
        fleet=GpuFleet(gpu=gpu, nodes=math.ceil(gpus / PER_NODE), per_node=min(PER_NODE, gpus)),
        lengths=Lengths.of_percentiles(p50, p99, cap=cap, prompt=prompt),
        prompts_per_step=rollout.prompts_per_step,
        group_size=rollout.group_size,
        learner=config.learner,
        shares=rollout.shares_prompts,
        has_critic=config.algorithm.critic is not None,
        replay_share=config.buffer.replay.share,
        max_staleness=config.staleness.max_staleness,
        measured=measured,
    )


def placement_of(config: RunConfig) -> FleetPlacement:
    """Return a config's use of its GPUs as a placement of the planner."""
    rollout, learner = config.rollout, config.learner
    return FleetPlacement(
        schedule=config.schedule,
        learner_gpus=learner.world_size,
        tensor_parallel=max(1, rollout.engine.gpus),
        replicas=rollout.replicas,
        max_batch=rollout.max_batch,
        batch_per_replica=rollout.batch_per_replica,
        kv_tokens=rollout.kv_capacity or MOST_CACHED,
        pack_tokens=config.row_tokens,
        recompute=learner.recompute,
        shard_ranks=learner.shard_ranks,
        context_parallel=learner.context_parallel,
        shared=config.shared_replicas,
        keeps_cache=config.shared_replicas > 0 and config.lease_cache is LeaseCache.KEEP,
    )


def _check_replicas(gpus: int, name: str, shape: ModelShape, measured: EmulationProfile | None) -> None:
    """Raise `ConfigError` for replicas of a size that the model or the profile does not allow."""
    if gpus and gpus not in shape.divisions:
        raise ConfigError(
            f"rollout.engine: {gpus} GPUs cannot divide the heads of {name}; choose of {shape.divisions}"
        )
    if measured is not None and measured.engine.gpus != max(1, gpus):
        raise ConfigError(
            f"--profile: it measured replicas of {measured.engine.gpus} GPUs, but rollout.engine has {gpus};"
            " measure such replicas"
        )
