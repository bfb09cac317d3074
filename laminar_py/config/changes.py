"""The settings that a running run can change, and the checks of a change.

`laminar set` and the controller call it. A changed config passes all checks of a config.
"""

from collections.abc import Iterable
from typing import cast

import yaml

from laminar_py.config.engine import Quantization
from laminar_py.config.loading import parse_config, read_yaml, setting_names
from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError

REPLICAS, BOUND, PUBLISH_EVERY = "rollout.replicas", "staleness.max_staleness", "learner.publish_every"
RANKS = "learner.world_size"
CHANGEABLE = (BOUND, PUBLISH_EVERY, "buffer.capacity", REPLICAS, RANKS)


def changed(config: RunConfig, *settings: str) -> RunConfig:
    """Return the config with other values of settings, e.g. `staleness.max_staleness=4`, checked as one.

    Raises `ConfigError` for a setting that a running run keeps, and for values that the config refuses.
    """
    values = dict(map(parse_change, settings))
    if BOUND in values and config.staleness.max_staleness is None:
        setting = f"{BOUND}={values[BOUND]}"
        raise ConfigError(f"{setting}: the run began without a bound; stop it and resume it with {setting}")
    if REPLICAS in values:
        _check_fleet(config, values[REPLICAS])
    if RANKS in values:
        _check_ranks(config, values[RANKS])
    tree = config.model_dump(mode="json")
    for name, value in values.items():
        section, _, key = name.partition(".")
        tree[section][key] = value
    return parse_config(tree)


def values_named(overrides: Iterable[str]) -> dict[str, int | None]:
    """Return the values of `CHANGEABLE` settings that overrides of a resume name, alone or in their section.

    E.g. {"staleness.max_staleness": 8} for `staleness={max_staleness: 8}`.
    """
    values: dict[str, int | None] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        value = read_yaml(text)
        for name in CHANGEABLE:
            section, _, inner = name.partition(".")
            if name == key:
                values[name] = cast("int | None", value)
            elif section == key and isinstance(value, dict) and inner in value:
                values[name] = value[inner]
    return values


def parse_change(setting: str) -> tuple[str, int]:
    """Return name and value of a setting such as `rollout.replicas=4`. Raises `ConfigError`."""
    name, equals, text = setting.partition("=")
    if not equals:
        raise ConfigError(f"setting={setting}: not of the form key=value; write for example {BOUND}=4")
    if name not in CHANGEABLE:
        takes = f"a running run takes {', '.join(CHANGEABLE)}"
        if name not in setting_names(RunConfig):
            raise ConfigError(f"{setting}: unknown key; {takes}")
        raise ConfigError(f"{setting}: {takes}; stop the run, and resume it with {setting}")
    try:
        value = read_yaml(text)
    except yaml.YAMLError:
        value = None
    if type(value) is not int:
        raise ConfigError(f"{setting}: is no whole number; write for example {name}=4")
    return name, value


def value_of(config: RunConfig, name: str) -> int | None:
    """Return the value of one of the `CHANGEABLE` settings; None of a bound or a capacity that is not set."""
    section, _, key = name.partition(".")
    value: int | None = getattr(getattr(config, section), key)
    return value


def resized(config: RunConfig, ranks: int) -> RunConfig:
    """Return the config with another number of learner ranks. Raises `ConfigError`."""
    return changed(config, f"{RANKS}={ranks}")


def scaled(config: RunConfig, replicas: int) -> RunConfig:
    """Return the config with another number of replicas. Raises `ConfigError`."""
    return changed(config, f"{REPLICAS}={replicas}")


def unquantized(config: RunConfig) -> RunConfig:
    """Return the config with engines that serve weights as published."""
    tree = config.model_dump(mode="json")
    tree["rollout"]["engine"]["quantization"] = Quantization.NONE.value
    return parse_config(tree)


def _check_ranks(config: RunConfig, ranks: int) -> None:
    """Raise `ConfigError` if the learner's ranks of a running run are fixed."""
    if config.rollout.engine.emulates is not None:
        raise ConfigError(
            f"{RANKS}={ranks}: this run's learner is emulated; stop it, and resume it with other"
            " rollout.engine.learner_devices"
        )
    if config.cluster.share:
        asked = f"{RANKS}={ranks}"
        raise ConfigError(f"{asked}: learner and replicas share devices; stop the run, and resume it with {asked}")


def _check_fleet(config: RunConfig, replicas: int) -> None:
    """Raise `ConfigError` for a number of replicas that a running run cannot have.

    A smaller draining fleet must admit a learner step under one version, else the learner would wait for a second
    version at every step.
    """
    rollout, step = config.rollout, config.new_per_step
    if rollout.engine.servers:
        raise ConfigError(
            f"rollout.replicas={replicas}: this run attaches to {len(rollout.engine.servers)} servers; stop it and"
            " resume it with another rollout.engine.urls"
        )
    most = rollout.batch_per_replica
    shrinks = 0 < replicas < rollout.replicas and rollout.on_new_weights is OnNewWeights.DRAIN
    if shrinks and replicas * most < step:
        raise ConfigError(
            f"rollout.replicas={replicas}: a learner step takes {step} new trajectories"
            " (rollout.prompts_per_step * rollout.group_size, without replayed ones), and"
            f" {replicas} with rollout.batch_per_replica={most} admit {replicas * most} under a version;"
            f" ask for {-(-step // most)} at least"
        )
