"""Configs as files: YAML with overrides in, YAML out, and every mistake as one line. Called by the command line.

A file holds no more than its model describes; what is wrong raises `ConfigError` before anything starts.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from laminar_py.config.emulation import EmulationProfile, choose_engine
from laminar_py.config.engine import BACKENDS, EngineConfig
from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError

BEGINNINGS = ("algorithm.name", "rollout.engine.kind")  # keys whose sections mean other things under other values
SOURCE = re.compile(
    r"(data\.train|eval\.sets\.[^.]+|warm_start\.data)\."
)  # sections that may be given as no more than a path
NEAR = 0.7  # likeness of two names, of 1, from which on one may have been meant by the other
Settings = TypeVar("Settings", bound=BaseModel)


def load_config(path: Path, overrides: list[str]) -> RunConfig:
    """The config of a run: a YAML file with `key.sub=value` overrides applied. Raises `ConfigError`.

    An override of `algorithm.name` or `rollout.engine.kind` begins that section anew: what the file says of
    another algorithm or engine goes with it.
    """
    return parse_config(read_tree(path, overrides))


def load_settings(kind: type[Settings], path: Path, overrides: list[str], *, help_at: str) -> Settings:
    """Settings of another kind in a YAML file, likewise. Raises `ConfigError`."""
    return _check(kind, read_tree(path, overrides), help_at=help_at)


def parse_config(tree: object) -> RunConfig:
    """A checked config from plain data, as YAML gives it. Raises `ConfigError` with one line."""
    return _check(RunConfig, choose_engine(tree), help_at="docs/config.md")


def read_profile(path: Path, *, setting: str = "emulation.profile") -> EmulationProfile:
    """The profile in a YAML file, which this setting names. Raises `ConfigError`."""
    if not path.is_file():
        raise ConfigError(f"{setting}={path}: no such file; name one such as configs/emulation/h100_7b.yaml")
    try:
        return load_settings(EmulationProfile, path, [], help_at="laminar_py/config/emulation.py")
    except ConfigError as error:
        raise ConfigError(f"{setting}={path}: {error}") from None


def read_tree(path: Path, overrides: list[str]) -> dict[str, object]:
    """Plain data of a YAML file, unchecked, with overrides applied. Raises `ConfigError`."""
    if not path.is_file():
        raise ConfigError(f"config={path}: no such file; name a YAML file such as configs/quickstart.yaml")
    try:
        tree = _read_yaml(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"config={path}: not YAML ({line}); mend the file") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"config={path}: holds no settings; write `key: value` lines")
    for override in overrides:
        if override.partition("=")[0] in BEGINNINGS:
            _begin(tree, override)
    for override in overrides:
        _apply(tree, override)
    return tree


def read_config(data: str) -> RunConfig:
    """The config that a process of a run is sent, as JSON. `ConfigError` where a plugin of it is not here."""
    return _check_json(RunConfig, data, help_at="docs/config.md")


def _check(kind: type[Settings], tree: object, *, help_at: str) -> Settings:
    return _check_json(kind, json.dumps(tree, default=str), help_at=help_at)


def _check_json(kind: type[Settings], data: str, *, help_at: str) -> Settings:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _cause(error, kind, help_at) from None


def dump_config(config: RunConfig) -> str:
    """YAML that `load_config` reads back to the same config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes `1e-3` for a string; this loader reads it as the number it is."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _read_yaml(text: str) -> object:
    return yaml.load(text, Loader=_Loader)


def _apply(tree: dict[str, object], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override={override}: not of the form key=value; write for example steps=10")
    node: dict[str, object] = tree
    *parents, leaf = key.split(".")
    for parent in parents:
        child = node.setdefault(parent, {})
        if isinstance(child, str) and SOURCE.match(key):
            child = node[parent] = {"path": child}
        if not isinstance(child, dict):
            raise ConfigError(f"override={override}: {parent} is a value, not a section; check the key")
        node = child
    try:
        node[leaf] = _read_yaml(value)
    except yaml.YAMLError:
        raise ConfigError(f"override={override}: its value is not YAML; quote it") from None


def _begin(tree: dict[str, object], override: str) -> None:
    """Empty the section that this override gives another meaning."""
    key, _, value = override.partition("=")
    *parents, leaf = key.split(".")
    node: object = tree
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    if isinstance(node, dict) and str(node.get(leaf)) != value:
        node.clear()


def _cause(error: ValidationError, kind: type[BaseModel], help_at: str) -> Exception:
    """The user's fault as a `ConfigError` of one line; an error of ours, which a validator ran into, as it is."""
    first = error.errors()[0]
    where = first["loc"]
    while isinstance(inner := first.get("ctx", {}).get("error"), ValidationError):  # of a section's own reader
        first = inner.errors()[0]
        where += first["loc"]
    if isinstance(inner, Exception) and not isinstance(inner, ConfigError):
        return inner
    field = ".".join(str(name) for name in where) or "config"
    if first["type"] == "extra_forbidden":
        meant = _remedy_of_engine(where) or _nearest(field, _settings(kind))
        return ConfigError(f"{field}={first['input']!r}: unknown key; {meant}{help_at} lists all of them")
    return ConfigError(_one_line(first, field, help_at))


def _one_line(first: ErrorDetails, field: str, help_at: str) -> str:
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{field}: missing; add it, {help_at} says what it means"
    named = message.startswith(f"{field.partition('.')[0]}.")
    if first["type"] == "value_error" and (named or isinstance(first["input"], dict)):  # our own, with its fields
        return message
    return f"{field}={first['input']!r}: {message[0].lower()}{message[1:]}; {help_at} has its bounds"


def _remedy_of_engine(where: tuple[int | str, ...]) -> str:
    """The built-in backend to choose for a setting that another one lacks; nothing for other settings."""
    *section, key = where
    if section != ["rollout", "engine"]:
        return ""
    owners = [kind for kind in BACKENDS.built_in if key in BACKENDS.get(kind).settings.model_fields]
    return f"set rollout.engine.kind={owners[0]}, or leave it out; " if owners else ""


def _nearest(field: str, known: list[str]) -> str:
    """A question after the setting that an unknown one may have meant; nothing where none is near.

    `steps` for `stepz`, in the same section, and `learner.lr` for a `lr` that stands elsewhere.
    """
    section, _, key = field.rpartition(".")
    beside = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    elsewhere = [name for name in known if name.rpartition(".")[2] == key]
    near = [beside[name] for name in get_close_matches(key, beside, n=1, cutoff=NEAR)] or elsewhere
    return f"did you mean {' or '.join(near)}? " if near else ""


def _settings(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Names of all settings, e.g. `rollout.sampling.top_k`; of engines those of every built-in backend."""
    kinds = [BACKENDS.get(kind).settings for kind in BACKENDS.built_in] if section is EngineConfig else [section]
    names = []
    for name, field in ((name, field) for kind in kinds for name, field in kind.model_fields.items()):
        names.append(prefix + name)
        for inner in _sections_in(field.annotation):
            names += _settings(inner, f"{prefix}{name}.")
    return list(dict.fromkeys(names))


def _sections_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)


WORD = re.compile(r"(?!(?:true|false|null|yes|no|on|off|y|n)$)[A-Za-z_/][\w./-]*", re.IGNORECASE)


def flatten(config: RunConfig) -> dict[str, object]:
    """Values of a config by their dotted keys."""
    return dict(_leaves(config.model_dump(mode="json"), ""))


def _leaves(tree: dict[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def to_overrides(settings: Mapping[str, object]) -> list[str]:
    """Settings as the command line has them: words as they are, all else as JSON, which is YAML."""
    plain = {key: isinstance(value, str) and WORD.fullmatch(value) for key, value in settings.items()}
    return [f"{key}={value if plain[key] else json.dumps(value)}" for key, value in settings.items()]


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
