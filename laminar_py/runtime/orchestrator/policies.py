"""Policies of a run from its config: scheduler and repacking. Called by the controller's constructor."""

from collections.abc import Callable
from dataclasses import replace

from laminar_py.config.run import RunConfig
from laminar_py.control.closing import Stages
from laminar_py.control.credit import Credit
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.control.settings import control_settings, packing
from laminar_py.learner.losses.advantages import group_advantages, overlong_cost
from laminar_py.records.finished import FinishedTrajectory
from laminar_py.records.trajectory import Prompt
from laminar_py.repack.migration import Migration, MigrationSettings
from laminar_py.runtime.orchestrator.versions import Versions
from laminar_py.runtime.preflight.inputs import Inputs
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.reference import ReferenceStage
from laminar_py.runtime.workers.replicas import Replicas


def make_scheduler(
    incarnation: Incarnation,
    *,
    submit_score: Callable[[FinishedTrajectory, Prompt], None],
    reference: ReferenceStage | None,
    versions_return: bool = False,
    fail: Callable[[str], None],
) -> TrajectoryScheduler:
    """Scheduler of trajectories, with the packing of its batches; that of a run that goes on awaits `restore`.

    `fail` is told why the run has to end, where all trajectories fail.
    """
    config = incarnation.config
    algorithm, sampling = config.algorithm, config.rollout.sampling
    scheduler = TrajectoryScheduler(
        replace(
            control_settings(config, stop_ids=incarnation.inputs.tokenizer.eos_ids),
            versions_return=versions_return,
        ),
        prompt_at=incarnation.inputs.stream.prompt,
        tell=incarnation.inputs.stream.tell,
        fail=fail,
        recorder=incarnation.ledger,
        stages=Stages(submit_score=submit_score, submit_reference=None if reference is None else reference.submit),
        credit=Credit(
            group_advantages(algorithm.advantage),
            overlong_cost(sampling.max_new_tokens, algorithm.overlong_tokens),
        ),
        clock=incarnation.clock,
    )
    scheduler.consumption.pack(packing(config))
    if incarnation.number > 1:
        scheduler.await_restore()
    return scheduler


def max_scored(config: RunConfig, inputs: Inputs) -> int:
    """Trajectories that can wait for a score: live ones, all of evaluations, and a trial."""
    sets = inputs.sets
    answers = sum(config.eval.sets[name].samples * len(prompts) for name, prompts in sets.items())
    evaluations = (2 + config.num_evaluations) * answers + len(inputs.first_of_tasks)
    return config.capacity + config.rollout.group_size + evaluations + 1


def make_migration(
    incarnation: Incarnation, *, scheduler: TrajectoryScheduler, replicas: Replicas, versions: Versions
) -> Migration:
    """Repacking of replicas."""
    return Migration(
        MigrationSettings.of(incarnation.config),
        scheduler=scheduler,
        fleet=replicas,
        published=versions.recorded_after,
        clock=incarnation.clock,
    )
