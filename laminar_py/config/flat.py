"""Settings by their dotted keys, and as the command line has them. Called by the command line and the launcher."""

import json
import re
from collections.abc import Iterator, Mapping

from laminar_py.config.run import RunConfig

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
