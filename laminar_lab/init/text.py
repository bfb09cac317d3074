"""Settings as commented YAML, in the order of docs/config.md."""

from collections.abc import Mapping

import yaml

from laminar_lab.init.counterparts import COUNTERPARTS
from laminar_py.config import RunConfig
from laminar_py.config.loading import setting_names

WIDTH = 112  # of a line with its comment
_ORDER = {name: place for place, name in enumerate(setting_names(RunConfig))}
COMMENTS = {key: row.meaning for key, row in COUNTERPARTS.items()} | {
    "data.chat.texts": "a text prompt becomes a message of the user",
    "rollout.engine.python": "interpreter of the environment that has SGLang",
    "rollout.engine.device": "cuda or cpu",
    "rollout.kv_capacity": "tokens of an engine's KV cache",
    "rollout.record": "the learner has to know a cut vocabulary",
    "relay.nodes": "one host: engines read the learner's files",
    "supervisor.heartbeat_timeout_s": "a part that is silent for so long is started again",
}


def to_tree(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings by dotted name as nested sections, in the order of docs/config.md."""
    tree: dict[str, object] = {}
    for key in sorted(settings, key=_place):
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            child = node.setdefault(section, {})
            assert isinstance(child, dict), f"{key} is below a value"
            node = child
        node[leaf] = settings[key]
    return tree


def commented(settings: Mapping[str, object], *, head: str) -> str:
    """Return YAML of settings by dotted name, each with its comment; `head` is the first line."""
    return "\n".join([f"# {head}", *_lines(to_tree(settings), settings, prefix="", indent="")]) + "\n"


def _place(key: str) -> int:
    return _ORDER.get(key, len(_ORDER))


def _lines(tree: Mapping[str, object], settings: Mapping[str, object], *, prefix: str, indent: str) -> list[str]:
    lines = []
    for name, value in tree.items():
        key, below = f"{prefix}{name}", value if isinstance(value, dict) else {}
        one = [full for full in settings if full.startswith(f"{key}.")]
        if key in settings or len(one) == 1:
            comment = COMMENTS.get(key) or COMMENTS.get((one or [""])[0])
            lines.append(_with_comment(f"{indent}{name}: {_flow(value)}", comment))
        else:
            lines.append(f"{indent}{name}:")
            lines += _lines(below, settings, prefix=f"{key}.", indent=f"{indent}  ")
    return lines


class _Dumper(yaml.SafeDumper):
    """YAML without anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _flow(value: object) -> str:
    """Return a value as YAML on one line."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10_000, sort_keys=False)
    return str(text).removesuffix("...\n").strip()


def _with_comment(line: str, comment: str | None) -> str:
    text = line if comment is None else f"{line}  # {comment}"
    return text if len(text) <= WIDTH else line
