"""Another size of a run's fleet: its config with other replicas, checked like the one that it began with.

Called by `laminar scale` before it asks, and by the controller, which is asked. Raises `ConfigError` alone.
"""

from collections.abc import Sequence

from laminar_py.config.loading import parse_config
from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError


def scaled(config: RunConfig, *, replicas: int | None, urls: Sequence[str] | None) -> RunConfig:
    """The config with so many replicas, or with one for each of these servers that run already."""
    _check_kind(config, replicas=replicas, urls=urls)
    count = replicas if urls is None else len(urls)
    if count:
        _check_step(config, count, asked=f"replicas={count}" if urls is None else f"urls={','.join(urls)}")
    tree = config.model_dump(mode="json")
    tree["rollout"]["replicas"] = count
    if urls is not None:
        tree["rollout"]["engine"]["urls"] = list(urls)
    return parse_config(tree)


def _check_kind(config: RunConfig, *, replicas: int | None, urls: Sequence[str] | None) -> None:
    servers = config.rollout.engine.servers
    if urls is None and servers:
        raise ConfigError(
            f"replicas={replicas}: this run attaches to {len(servers)} servers; name all that it is to have, as"
            " urls=[http://...]"
        )
    if urls is not None and not servers:
        raise ConfigError(
            f"urls={','.join(urls)}: this run starts its own engines; say how many, as replicas=N, or begin a run"
            " with rollout.engine.urls"
        )
    if urls is not None and not urls:
        raise ConfigError("urls=[]: a run needs a server at least; name one, or stop the run")
    if urls is not None and replicas not in (None, len(urls)):
        raise ConfigError(f"replicas={replicas}: urls names {len(urls)} servers; leave replicas out")


def _check_step(config: RunConfig, replicas: int, *, asked: str) -> None:
    """Refuse a smaller fleet that admits, under one version, less than a learner step takes.

    Where replicas drain, the learner would wait for a second version at every step.
    """
    rollout, step = config.rollout, config.trajectories_per_step
    most = rollout.batch_per_replica
    shrinks = replicas < rollout.replicas and rollout.on_new_weights is OnNewWeights.DRAIN
    if shrinks and replicas * most < step:
        raise ConfigError(
            f"{asked}: a learner step takes {step} trajectories (rollout.prompts_per_step *"
            f" rollout.group_size), and {replicas} with rollout.batch_per_replica={most} admit {replicas * most}"
            f" under a version; ask for {-(-step // most)} at least"
        )
