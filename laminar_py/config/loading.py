"""Config files: the command line reads YAML with overrides, and writes YAML.

Every mistake in a file raises `ConfigError`, whose message is one line, before anything starts.
"""

import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from laminar_py.config.engine import BACKENDS, EngineConfig
from laminar_py.config.registry import SECTION
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError

RESETTING = ("algorithm.name", "rollout.engine.kind")  # keys whose value decides the meaning of their section
# keys inside sections that may be given as a path alone
SOURCE = re.compile(r"(data\.train|eval\.sets\.[^.]+|warm_start\.data|environment)\.")
NEAR = 0.7  # least likeness (1: equal) of a known name to a mistyped name, to suggest the known name
WORD = re.compile(r"(?!(?:true|false|null|yes|no|on|off|y|n)$)[A-Za-z_/][\w./-]*", re.IGNORECASE)
Settings = TypeVar("Settings", bound=BaseModel)


def load_config(path: Path, overrides: list[str]) -> RunConfig:
    """Read a run's config from a YAML file, and apply `key.sub=value` overrides. Raises `ConfigError`.

    An override that changes `algorithm.name` or `rollout.engine.kind` drops the file's other settings of that
    section, since they belong to another algorithm or engine.
    """
    return parse_config(read_tree(path, overrides))


def load_settings(kind: type[Settings], path: Path, overrides: list[str], *, help_at: str) -> Settings:
    """Read settings of type `kind` from YAML with overrides. Raises `ConfigError` that names page `help_at`."""
    return _check(kind, read_tree(path, overrides), help_at=help_at)


def parse_config(tree: object) -> RunConfig:
    """Check plain data, e.g. from YAML, and return it as the config of a run. Raises `ConfigError`."""
    return _check(RunConfig, tree, help_at="docs/config.md")


def read_tree(path: Path, overrides: list[str]) -> dict[str, object]:
    """Read a YAML file and apply overrides, without a check of the settings. Raises `ConfigError`."""
    if not (path.is_file() or path.is_fifo()):  # a shell's <(command) is a pipe
        fault = "is no file" if path.exists() else "no such file"
        raise ConfigError(f"config={path}: {fault}; name a YAML file such as configs/quickstart.yaml")
    try:
        tree = read_yaml(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"config={path}: not YAML ({line}); fix the file") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"config={path}: holds no settings; write `key: value` lines")
    for override in overrides:
        if override.partition("=")[0] in RESETTING:
            _reset_section(tree, override)
    for override in overrides:
        _apply_override(tree, override)
    return tree


def read_config(data: str) -> RunConfig:
    """Read the JSON config that a process of a run receives. Raises `ConfigError` if a package is missing here."""
    return _check_json(RunConfig, data, help_at="docs/config.md")


def _check(kind: type[Settings], tree: object, *, help_at: str) -> Settings:
    return _check_json(kind, json.dumps(tree, default=str), help_at=help_at)


def _check_json(kind: type[Settings], data: str, *, help_at: str) -> Settings:
    """Read settings of type `kind` from JSON. Raises `ConfigError` that names page `help_at`."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _to_config_error(error, kind, help_at) from None


def dump_config(config: RunConfig) -> str:
    """Return YAML from which `load_config` reads the same config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


class _Loader(yaml.SafeLoader):
    """YAML loader that reads `1e-3` as a number and `off` as a word, as YAML 1.2 does."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:bool"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_yaml(text: str) -> object:
    """Read YAML, with `1e-3` as a number and `off` as a word. Raises `yaml.YAMLError`."""
    return yaml.load(text, Loader=_Loader)


def _apply_override(tree: dict[str, object], override: str) -> None:
    """Set one value of `tree` by an override such as `rollout.replicas=8`. Raises `ConfigError`."""
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override={override}: not of the form key=value; write for example steps=10")
    node: dict[str, object] = tree
    *parents, leaf = key.split(".")
    for parent in parents:
        child = node.setdefault(parent, {})
        if child is None or (isinstance(child, str) and SOURCE.match(key)):  # null: a section that is left out
            child = node[parent] = {} if child is None else {"path": child}
        if not isinstance(child, dict):
            kind, remedy = (
                ("list", "give the whole list") if isinstance(child, list) else ("value", "check the key")
            )
            raise ConfigError(f"override={override}: {parent} is a {kind}, not a section; {remedy}")
        node = child
    try:
        node[leaf] = read_yaml(value)
    except yaml.YAMLError:
        raise ConfigError(f"override={override}: its value is not YAML; put the value in quotes") from None


def _reset_section(tree: dict[str, object], override: str) -> None:
    """Delete all settings of the section whose key `override` changes, e.g. by `algorithm.name=dapo`."""
    key, _, value = override.partition("=")
    *parents, leaf = key.split(".")
    node: object = tree
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    if isinstance(node, dict) and str(node.get(leaf)) != value:
        node.clear()


def _to_config_error(error: ValidationError, kind: type[BaseModel], help_at: str) -> Exception:
    """Return a `ConfigError` of one line for a user's mistake; return another error of a validator unchanged.

    An unknown key comes before a missing one, since it is often that key in another spelling.
    """
    first, known = _first_of(error), setting_names(kind)
    where = first["loc"]
    while isinstance(inner := first.get("ctx", {}).get("error"), ValidationError):  # raised by `named_section`
        first = _first_of(inner)
        where += first["loc"]
    if isinstance(inner, Exception) and not isinstance(inner, ConfigError):
        return inner
    from laminar_py.config.their_names import VERL_SECTIONS  # a table that only a mistake needs

    field = ".".join(str(name) for name in where) or "config"
    if field in VERL_SECTIONS and first["type"] == "extra_forbidden":
        return ConfigError(f"{field}: a section of verl; laminar init --from verl FILE translates the whole file")
    if (named := first.get("ctx", {}).get(SECTION)) is not None:
        known += setting_names(named.model, "".join(f"{name}." for name in where[: -named.depth]))
    if first["type"] == "extra_forbidden":
        meant = _engine_remedy(where) or _suggestion(field, known)
        return ConfigError(f"{field}={first['input']!r}: unknown key; {meant}{help_at} lists all settings")
    return ConfigError(_one_line(first, field, help_at))


def _first_of(error: ValidationError) -> ErrorDetails:
    found = error.errors()
    return next((one for one in found if one["type"] == "extra_forbidden"), found[0])


def _one_line(first: ErrorDetails, field: str, help_at: str) -> str:
    """Return a pydantic error as one line with the field, its value and where it is explained."""
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{field}: missing; add it, {help_at} explains it"
    if first["type"] == "bool_type":
        return f"{field}={first['input']!r}: is neither true nor false; write true or false"
    named = message.startswith(f"{field.partition('.')[0]}.")
    if first["type"] == "value_error" and (named or isinstance(first["input"], dict)):  # from our own validator
        return message
    return f"{field}={first['input']!r}: {message[0].lower()}{message[1:]}; {help_at} has its bounds"


def _engine_remedy(where: tuple[int | str, ...]) -> str:
    """Return the remedy for a setting of another built-in backend than the run's; "" for other settings."""
    *section, key = where
    if section != ["rollout", "engine"]:
        return ""
    owners = [kind for kind in BACKENDS.built_in if key in BACKENDS.get(kind).settings.model_fields]
    return f"set rollout.engine.kind={owners[0]}, or leave it out; " if owners else ""


def _suggestion(field: str, known: list[str]) -> str:
    """Return a question that suggests a known setting for the unknown `field`; "" if no name is near.

    Suggests `steps` for `stepz` in the same section, `learner.lr` for `lr` in another section or for TRL's
    `learning_rate`. For a setting of TRL or verl without a counterpart it says what to do.
    """
    from laminar_py.config.their_names import our_keys, reason_without

    section, _, key = field.rpartition(".")
    beside = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    elsewhere = [name for name in known if name.rpartition(".")[2] == key]
    theirs = [f"{ours} ({name})" for ours, name in our_keys(key) if ours in known and not elsewhere]
    near = theirs or [beside[name] for name in get_close_matches(key, beside, n=1, cutoff=NEAR)] or elsewhere
    return f"did you mean {' or '.join(near)}? " if near else reason_without(key)


def setting_names(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted names of all settings, e.g. `rollout.replicas`, also of every built-in backend."""
    kinds = [BACKENDS.get(kind).settings for kind in BACKENDS.built_in] if section is EngineConfig else [section]
    names = []
    for name, field in ((name, field) for kind in kinds for name, field in kind.model_fields.items()):
        names.append(prefix + name)
        for inner in _sections_in(field.annotation):
            names += setting_names(inner, f"{prefix}{name}.")
    return list(dict.fromkeys(names))


def _sections_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the models in a type annotation, e.g. `EvalSetConfig` in `dict[str, EvalSetConfig]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)


def flatten(config: RunConfig) -> dict[str, object]:
    """Return dotted name -> value for all settings of a config, e.g. `rollout.replicas` -> 2."""
    return dict(_leaves(config.model_dump(mode="json"), ""))


def _leaves(tree: dict[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    """Yield (`prefix` + dotted name, value) for each value of a tree; an empty section is a value."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def to_overrides(settings: Mapping[str, object]) -> list[str]:
    """Return settings as `name=value` arguments: plain words as they are, other values as JSON (also YAML)."""
    plain = {key: isinstance(value, str) and WORD.fullmatch(value) for key, value in settings.items()}
    return [f"{key}={value if plain[key] else json.dumps(value)}" for key, value in settings.items()]
