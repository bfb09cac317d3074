"""Policies of a run from its config: scheduler, packing, repacking. Called by the controller's constructor."""

from collections.abc import Callable
from dataclasses import replace

from laminar_py.config.algorithm import Truncated
from laminar_py.config.repack import DEFAULT_PLANNER
from laminar_py.config.rollout import OnNewWeights, WithoutSignal
from laminar_py.config.run import RunConfig
from laminar_py.config.staleness import Schedule, StalePolicy
from laminar_py.control.book import ControlSettings
from laminar_py.control.closing import Credit, Stages
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.control.staleness import Admission, StalenessBound
from laminar_py.learner.losses.advantages import group_advantages, overlong_cost
from laminar_py.orchestrator.versions import Versions
from laminar_py.packing.stage import Packing
from laminar_py.preflight.inputs import Inputs
from laminar_py.records.finished import FinishedTrajectory
from laminar_py.records.trajectory import Prompt
from laminar_py.repack.migration import Migration, MigrationSettings
from laminar_py.workers.incarnation import Incarnation
from laminar_py.workers.reference import ReferenceStage
from laminar_py.workers.replicas import Replicas

COUNTERFACTUAL_SHARE = 8  # one in so many of what all replicas decode at a time


def make_scheduler(
    incarnation: Incarnation,
    *,
    submit_score: Callable[[FinishedTrajectory, Prompt], None],
    reference: ReferenceStage | None,
    versions_return: bool = False,
) -> TrajectoryScheduler:
    """Scheduler of trajectories, with the packing of its batches."""
    config = incarnation.config
    algorithm, sampling = config.algorithm, config.rollout.sampling
    scheduler = TrajectoryScheduler(
        replace(
            control_settings(config, stop_ids=incarnation.inputs.tokenizer.eos_ids),
            versions_return=versions_return,
        ),
        prompt_at=incarnation.inputs.stream.prompt,
        tell=incarnation.inputs.stream.tell,
        recorder=incarnation.ledger,
        stages=Stages(submit_score=submit_score, submit_reference=None if reference is None else reference.submit),
        credit=Credit(
            group_advantages(algorithm.advantage),
            overlong_cost(sampling.max_new_tokens, algorithm.overlong_tokens),
        ),
        clock=incarnation.clock,
    )
    scheduler.consumption.pack(packing(config))
    return scheduler


def control_settings(config: RunConfig, *, stop_ids: tuple[int, ...]) -> ControlSettings:
    """Settings of the scheduler."""
    rollout, staleness = config.rollout, config.staleness
    sampling = rollout.sampling.params(stop_ids=stop_ids)
    return ControlSettings(
        seed=config.seed,
        replicas=rollout.replicas,
        batch_per_replica=rollout.batch_per_replica,
        group_size=rollout.group_size,
        sampling=sampling,
        of_sets={name: settings.sampling(sampling) for name, settings in config.eval.sets.items()},
        without_signal=WithoutSignal.TRAIN if config.algorithm.normalises_step else rollout.without_signal,
        max_refill=rollout.max_refill,
        masks_truncated=config.algorithm.truncated is Truncated.MASK,
        one_version=rollout.on_new_weights is OnNewWeights.DRAIN,
        admission=Admission(
            schedule=config.schedule,
            batch=rollout.prompts_per_step,
            capacity=max_groups(config),
            max_staleness=staleness.max_staleness,
            wait=StalePolicy.WAIT in staleness.policies,
            publish_every=config.learner.publish_every,
        ),
        bound=StalenessBound(staleness.max_staleness, staleness.policies),
        group_deadline_s=rollout.group_deadline_s,
        counterfactual_share=rollout.counterfactual_share,
        max_counterfactual=max_counterfactual(config),
        max_seconds=rollout.max_seconds,
    )


def packing(config: RunConfig) -> Packing:
    """How the batches of steps are packed."""
    packer = config.packer
    return Packing(
        groups=config.rollout.prompts_per_step,
        max_tokens=packer.max_tokens,
        ranks=config.learner.world_size,
        look_ahead=packer.look_ahead,
        by_id=config.schedule is Schedule.SYNC,
    )


def max_groups(config: RunConfig) -> int:
    """Live groups at most."""
    return config.capacity // config.rollout.group_size


def max_counterfactual(config: RunConfig) -> int:
    """Trajectories at a time that count for the record and not for training."""
    rollout = config.rollout
    return -(-rollout.replicas * rollout.max_batch // COUNTERFACTUAL_SHARE) if rollout.counterfactual_share else 0


def max_scored(config: RunConfig, inputs: Inputs) -> int:
    """Trajectories that can wait for a score: live ones, all of evaluations, counterfactual ones; and a trial."""
    sets = inputs.sets
    answers = sum(config.eval.sets[name].samples * len(prompts) for name, prompts in sets.items())
    evaluations = (2 + config.num_evaluations) * answers + len(inputs.first_of_tasks)
    return config.capacity + config.rollout.group_size + evaluations + max_counterfactual(config) + 1


def make_migration(
    incarnation: Incarnation, *, scheduler: TrajectoryScheduler, replicas: Replicas, versions: Versions
) -> Migration:
    """Repacking of replicas."""
    repack = incarnation.config.repack
    return Migration(
        MigrationSettings(
            repack.planner or DEFAULT_PLANNER,
            repack.interval_s,
            repack.max_stall_s,
            incarnation.config.rollout.sampling.max_new_tokens,
        ),
        scheduler=scheduler,
        fleet=replicas,
        published=versions.recorded_after,
        clock=incarnation.clock,
    )
