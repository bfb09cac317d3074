"""Factories of a run's parts from its config. Called by the controller's constructor; nothing starts here.

A factory takes what all parts share, and the parts that its own one needs.
"""

from collections.abc import Awaitable, Callable

from laminar_py.config.repack import DEFAULT_PLANNER
from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.config.staleness import Schedule, StalePolicy
from laminar_py.control.book import ControlSettings
from laminar_py.control.closing import Credit, Stages
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.control.staleness import Admission, StalenessBound
from laminar_py.learner.losses.advantages import group_advantages, overlong_cost
from laminar_py.orchestrator.checkpoints import Checkpoints
from laminar_py.orchestrator.evaluator import Evaluator
from laminar_py.orchestrator.incarnation import Incarnation
from laminar_py.orchestrator.scoring import Scoring
from laminar_py.orchestrator.versions import Versions
from laminar_py.packing.stage import Packing
from laminar_py.records.events import Evaluated
from laminar_py.records.trajectory import Prompt, Trajectory
from laminar_py.repack.migration import Migration, MigrationSettings
from laminar_py.workers.learner import LearnerLink
from laminar_py.workers.reference import ReferenceStage
from laminar_py.workers.relays import Relays
from laminar_py.workers.replicas import Replicas
from laminar_py.workers.scorers import Scorers

COUNTERFACTUAL_SHARE = 8  # one in so many of what all replicas decode at a time

# ---- policies


def make_scheduler(
    shared: Incarnation, *, submit_score: Callable[[Trajectory, Prompt], None], reference: ReferenceStage | None
) -> TrajectoryScheduler:
    """Scheduler of trajectories, with the packing of its batches."""
    config = shared.config
    algorithm, sampling = config.algorithm, config.rollout.sampling
    scheduler = TrajectoryScheduler(
        control_settings(config, stop_ids=shared.inputs.tokenizer.eos_ids),
        prompt_at=shared.inputs.stream.prompt,
        recorder=shared.ledger,
        stages=Stages(submit_score=submit_score, submit_reference=None if reference is None else reference.submit),
        credit=Credit(
            group_advantages(algorithm.advantage),
            overlong_cost(sampling.max_new_tokens, algorithm.overlong_tokens),
        ),
        clock=shared.clock,
    )
    scheduler.consumption.pack(packing(config))
    return scheduler


def control_settings(config: RunConfig, *, stop_ids: tuple[int, ...]) -> ControlSettings:
    """Settings of the scheduler."""
    rollout, staleness = config.rollout, config.staleness
    return ControlSettings(
        seed=config.seed,
        replicas=rollout.replicas,
        group_size=rollout.group_size,
        sampling=rollout.sampling.params(stop_ids=stop_ids),
        without_signal=rollout.without_signal,
        one_version=rollout.on_new_weights is OnNewWeights.DRAIN,
        admission=Admission(
            schedule=config.schedule,
            batch=rollout.prompts_per_step,
            capacity=config.capacity // rollout.group_size,
            max_staleness=staleness.max_staleness,
            wait=StalePolicy.WAIT in staleness.policies,
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


def max_counterfactual(config: RunConfig) -> int:
    """Trajectories at a time that count for the record and not for training."""
    rollout = config.rollout
    return -(-rollout.replicas * rollout.max_batch // COUNTERFACTUAL_SHARE) if rollout.counterfactual_share else 0


def max_scored(config: RunConfig, *, num_heldout: int) -> int:
    """Trajectories that can wait for a score: live ones, all of evaluations, counterfactual ones."""
    evaluations = (2 + config.num_evaluations) * num_heldout
    return config.capacity + config.rollout.group_size + evaluations + max_counterfactual(config)


def make_migration(
    shared: Incarnation, *, scheduler: TrajectoryScheduler, replicas: Replicas, versions: Versions
) -> Migration:
    """Repacking of replicas."""
    repack = shared.config.repack
    return Migration(
        MigrationSettings(
            repack.planner or DEFAULT_PLANNER,
            repack.interval_s,
            repack.max_stall_s,
            shared.config.rollout.sampling.max_new_tokens,
        ),
        scheduler=scheduler,
        fleet=replicas,
        published=versions.recorded_after,
        clock=shared.clock,
    )


def make_versions(shared: Incarnation, *, learner: LearnerLink, relays: Relays) -> Versions:
    """Versions on their way onto the record."""
    return Versions(
        ledger=shared.ledger, completed=learner.completed, stored=relays.published, incarnation=shared.number
    )


def make_evaluator(
    shared: Incarnation,
    *,
    scheduler: TrajectoryScheduler,
    replicas: Replicas,
    hold: Callable[[int], Awaitable[None]],
    publish: Callable[[Evaluated], None],
) -> Evaluator:
    """Held-out evaluations, those of before left out."""
    return Evaluator(
        shared.config.eval,
        prompts=shared.inputs.heldout,
        rl_s=shared.stats.rl_s,
        scheduler=scheduler,
        hold=hold,
        restart_replicas=replicas.restart,
        publish=publish,
    )


def make_checkpoints(
    shared: Incarnation, learner: LearnerLink, versions: Versions, scheduler: TrajectoryScheduler
) -> Checkpoints:
    """Checkpoints, from the last one on."""
    return Checkpoints(
        shared.run,
        ledger=shared.ledger,
        save=learner.save,
        saved=learner.saved,
        recorded=versions.on_record,
        settled=scheduler.consumption.checkpointed,
        clock=shared.clock,
        keep=shared.config.learner.keep_checkpoints,
        last=shared.checkpoint,
    )


# ---- processes


def make_replicas(shared: Incarnation, *, scheduler: TrajectoryScheduler, relays: Relays) -> Replicas:
    """Rollout replicas."""
    return Replicas(shared, scheduler=scheduler, relays=relays, stats=shared.stats)


def make_scoring(shared: Incarnation, *, scheduler: TrajectoryScheduler) -> Scoring:
    """Scoring stage and its processes."""
    return Scoring(
        Scorers(shared),
        scheduler=scheduler,
        stats=shared.stats,
        timeout_s=shared.config.reward.timeout_s,
        most=max_scored(shared.config, num_heldout=len(shared.inputs.heldout)),
    )


def make_reference(shared: Incarnation) -> ReferenceStage | None:
    """Reference stage; None where the algorithm needs none."""
    if not shared.config.algorithm.refers_in_stage:
        return None
    return ReferenceStage(shared, ledger=shared.ledger, busy=shared.stats.referred)
