"""The kind `supervised` of a warm start. The result of the same inputs is the same folder of the cache."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from laminar_contrib.supervised.settings import PRETRAINED_LR, RUINOUS_LR, SupervisedConfig
from laminar_py.config import ConfigError
from laminar_py.config.warm_start import OnStep, WarmStartKind

if TYPE_CHECKING:
    from laminar_py.config import RunConfig
    from laminar_py.data import Demonstrations, PromptEncoder

MOST_PARAMETERS = 500_000_000  # more take days on the CPU
log = logging.getLogger(__name__)


def settings_of(config: "RunConfig") -> SupervisedConfig:
    """Return the section `warm_start` of a run with this kind."""
    assert isinstance(config.warm_start, SupervisedConfig), "called only for a run with this kind"
    return config.warm_start


def read(config: "RunConfig", encoder: "PromptEncoder") -> "Demonstrations":
    """Read the demonstrations of a run. Raises `ConfigError`."""
    from laminar_contrib.supervised.demonstrations import read_demonstrations
    from laminar_py.data import DataSource, Demonstrations

    settings = settings_of(config)
    source = DataSource("warm_start.data", settings.data)
    rows = read_demonstrations(source, encoder=encoder)
    return Demonstrations(source=source, all=rows, max_tokens=settings.tokens_per_step)


def check(config: "RunConfig", encoder: "PromptEncoder") -> "Demonstrations":
    """Read the demonstrations of a run; raise `ConfigError` if one is too long, or the model is too large."""
    refuse_large_model(config)
    _warn_of_rate(config)
    demonstrations = read(config, encoder)
    refuse_long(demonstrations)
    return demonstrations


def _warn_of_rate(config: "RunConfig") -> None:
    """Log a warning for a learning rate that ruins a pretrained model."""
    settings = settings_of(config)
    if not config.model.from_scratch and (lr := settings.peak_lr(config.model)) > RUINOUS_LR:
        log.warning(
            "warm_start.lr=%g: a pretrained model forgets much above %g; leave it out for %g",
            lr,
            RUINOUS_LR,
            PRETRAINED_LR,
        )


def refuse_long(demonstrations: "Demonstrations") -> None:
    """Raise `ConfigError` for the first demonstration that does not fit into a step."""
    long = next((one for one in demonstrations.all if one.num_tokens > demonstrations.max_tokens), None)
    if long is not None:
        raise demonstrations.source.error(
            long.row,
            f"{long.num_tokens} tokens, above warm_start.tokens_per_step={demonstrations.max_tokens},",
            value=long.prompt,
            remedy="raise warm_start.tokens_per_step or shorten the response",
        )


def refuse_large_model(config: "RunConfig") -> None:
    """Raise `ConfigError` for a model that would train for days, unless the cache has its result."""
    from laminar_py.runtime.preflight import num_parameters

    if (count := num_parameters(config.model.path)) > MOST_PARAMETERS and not folder(config).is_dir():
        raise ConfigError(
            f"warm_start: model.path={config.model.path} has {count / 1e9:.2f} billion parameters, and a warm"
            " start is on the CPU, for at most half a billion; train on the demonstrations elsewhere, set"
            " model.path to the result, and leave warm_start out"
        )


def folder(config: "RunConfig") -> Path:
    """Return the folder of the result in the cache. Raises `ConfigError` if the demonstrations are gone."""
    from laminar_contrib.supervised.cache import cached_folder

    settings = settings_of(config)
    if not settings.data.is_hub_name and not Path(settings.data.path).exists():
        raise ConfigError(
            f"warm_start.data={settings.data.path}: is gone; the cached warm start is found by its contents, so"
            " put it back"
        )
    chat, environment = config.data.chat, config.environment
    return cached_folder(config.model, settings, seed=config.seed, chat=chat, environment=environment)


def make(config: "RunConfig", on_step: OnStep) -> None:
    """Train on the demonstrations of a run and put the result into the cache, unless it is there."""
    from laminar_contrib.supervised.training import warm_start
    from laminar_py.data import PromptEncoder, load_tokenizer

    made = folder(config)
    if made.is_dir():
        return
    path = config.model.path
    demonstrations = read(config, PromptEncoder(load_tokenizer(path), path, config.data.chat, config.environment))
    warm_start(
        config.model, settings_of(config), demonstrations.all, folder=made, seed=config.seed, on_step=on_step
    )


SUPERVISED = WarmStartKind(settings=SupervisedConfig, read=read, check=check, folder=folder, make=make)
