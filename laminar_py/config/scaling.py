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
    tree = config.model_dump(mode="json")
    rollout = tree["rollout"]
    if urls is not None:
        rollout["engine"]["urls"] = list(urls)
    rollout["replicas"] = replicas if urls is None else len(urls)
    changed = parse_config(tree)
    _check_step(changed)
    return changed


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


def _check_step(config: RunConfig) -> None:
    """Refuse a fleet that has not room, all at once, for the trajectories of one learner step."""
    rollout, step = config.rollout, config.trajectories_per_step
    drains = rollout.on_new_weights is OnNewWeights.DRAIN
    name, most = ("batch_per_replica", rollout.batch_per_replica) if drains else ("max_batch", rollout.max_batch)
    if rollout.replicas * most < step:
        field = "urls" if rollout.engine.servers else "replicas"
        raise ConfigError(
            f"{field}={rollout.replicas}: a learner step takes {step} trajectories (rollout.prompts_per_step *"
            f" rollout.group_size), and {rollout.replicas} with rollout.{name}={most} have"
            f" {rollout.replicas * most} under way; ask for {-(-step // most)} at least"
        )
