"""Settings of the scheduler from the config of a run: the same for a run and for one that is simulated. Pure."""

from laminar_py.config.algorithm import Truncated
from laminar_py.config.rollout import OnNewWeights, WithoutSignal
from laminar_py.config.run import RunConfig
from laminar_py.config.staleness import Schedule, StalePolicy
from laminar_py.control.book import ControlSettings
from laminar_py.control.staleness import Admission, StalenessBound
from laminar_py.learner.packing.stage import Packing


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
            drops_silent=rollout.without_signal is WithoutSignal.REFILL,
        ),
        bound=StalenessBound(staleness.max_staleness, staleness.policies),
        group_deadline_s=rollout.group_deadline_s,
        max_seconds=rollout.max_seconds,
        has_environment=config.has_environment,
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
