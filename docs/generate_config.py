"""Writes docs/config.md from the config models: `python docs/generate_config.py`. A test keeps it up to date."""

import json
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from laminar_py.config.engine import BACKENDS
from laminar_py.config.environment import ENVIRONMENTS, EnvironmentConfig
from laminar_py.config.registry import Registry
from laminar_py.config.reward import REWARDS, TermConfig
from laminar_py.config.run import RunConfig
from laminar_py.config.section import Section
from laminar_py.config.warm_start import WARM_STARTS, WarmStartConfig

HEAD = """# Settings

Generated from `laminar_py/config` by `make docs`. A config is a YAML file; any setting can be given on the
command line as `key.sub=value`. Unknown keys, wrong types and values out of range are refused with one line.
"""


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section model that a field holds, if it holds one; terms of rewards have tables of their own."""
    for given in (field.annotation, *get_args(field.annotation)):
        kind = get_args(given)[0] if get_origin(given) is Annotated else given
        if isinstance(kind, type) and issubclass(kind, Section) and kind is not TermConfig:
            return kind
    return None


def type_of(field: FieldInfo, name: str, schema: dict[str, object]) -> str:
    """The type as YAML users know it, with bounds."""
    properties = schema["properties"]
    assert isinstance(properties, dict)
    return describe(properties[name], schema)


def describe(entry: dict[str, object], schema: dict[str, object]) -> str:
    """JSON schema of one value, in a few words."""
    if "anyOf" in entry:
        return " or ".join(describe(option, schema) for option in entry["anyOf"])
    if "$ref" in entry:
        name = str(entry["$ref"]).rpartition("/")[2]
        definition = schema["$defs"][name]
        return " \\| ".join(f"`{value}`" for value in definition.get("enum", [name]))
    words = {"integer": "integer", "number": "number", "boolean": "true or false", "null": "null", "array": "list"}
    kind = words.get(str(entry.get("type")), str(entry.get("format", entry.get("type"))))
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {entry[key]:g}" for key, sign in signs.items() if key in entry]
    return " ".join([kind, ", ".join(bounds)]).strip()


def default_of(field: FieldInfo) -> str:
    """The default as YAML, or that there is none."""
    if field.default is PydanticUndefined:
        return "required"
    value = field.default
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, tuple):
        return f"`[{', '.join(str(getattr(item, 'value', item)) for item in value)}]`"
    if isinstance(value, str) and value != value.strip():
        return f"`{json.dumps(value)}`"
    return f"`{'null' if value is None else str(getattr(value, 'value', value))}`"


def rows(model: type[Section], *, beyond: type[Section] = Section) -> str:
    """The table of one section; `beyond` is a base whose settings have a table of their own."""
    schema = model.model_json_schema()
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if section_of(field) is None and name not in beyond.model_fields:
            meaning = " ".join((field.description or "").split())
            lines.append(f"| `{name}` | {type_of(field, name, schema)} | {default_of(field)} | {meaning} |")
    return "\n".join(lines)


def of_backends(base: type[Section]) -> list[str]:
    """What each backend adds to the settings of `rollout.engine`, and sections that are its own."""
    parts = []
    for name in BACKENDS.names():
        section = BACKENDS.get(name).settings
        if len(section.model_fields) > len(base.model_fields):
            doc = " ".join((section.__doc__ or "").split())
            parts.append(f"### `rollout.engine` with `kind: {name}`\n\n{doc}\n\n{rows(section, beyond=base)}")
        parts += of_inner(section, "rollout.engine")
    return parts


def of_inner(section: type[Section], name: str) -> list[str]:
    """Tables of the sections inside a section of a kind."""
    parts = []
    for field, info in section.model_fields.items():
        if (inner := section_of(info)) is not None:
            doc = " ".join((inner.__doc__ or "").split())
            parts.append(f"#### `{name}.{field}`\n\n{doc}\n\n{rows(inner)}")
    return parts


def of_rewards() -> list[str]:
    """Settings of a term of a reward, and what each kind adds."""
    parts = [f"### A term of `reward.use` and `reward.by_task`\n\n{rows(TermConfig)}"]
    for name in REWARDS.names():
        section = REWARDS.get(name).settings
        doc = " ".join((section.__doc__ or "").split())
        parts.append(f"### A term with `kind: {name}`\n\n{doc}\n\n{rows(section, beyond=TermConfig)}")
    return parts


def of_kinds(section: str, base: type[Section], registry: Registry[Any]) -> list[str]:
    """What each kind of a section adds, and sections that are its own."""
    parts = []
    for name in registry.names():
        kind = registry.get(name).settings
        doc = " ".join((kind.__doc__ or "").split())
        parts.append(f"### `{section}` with `kind: {name}`\n\n{doc}\n\n{rows(kind, beyond=base)}")
        parts += of_inner(kind, section)
    return parts


def document() -> str:
    """All of docs/config.md."""
    parts = [HEAD, "## Run\n\n" + rows(RunConfig)]
    pending = [(name, field) for name, field in RunConfig.model_fields.items()]
    while pending:
        name, field = pending.pop(0)
        section = section_of(field)
        if section is None:
            continue
        doc = " ".join((section.__doc__ or "").split())
        parts.append(f"## `{name}`\n\n{doc}\n\n{rows(section)}")
        if name == "rollout.engine":
            parts += of_backends(section)
        if name == "reward":
            parts += of_rewards()
        if name == "environment":
            parts += of_kinds(name, EnvironmentConfig, ENVIRONMENTS)
        if name == "warm_start":
            parts += of_kinds(name, WarmStartConfig, WARM_STARTS)
        pending = [(f"{name}.{sub}", inner) for sub, inner in section.model_fields.items()] + pending
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("config.md").write_text(document())
