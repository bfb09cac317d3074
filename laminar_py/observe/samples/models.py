"""Finds the tokenizer of the model that a run trains or evaluates, and when its problems count as solved.

Called by `reading`. Only what texts need is read of a run's config: the run may be of another release, or of a
plugin that is not here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec
import yaml

from laminar_py.config.section import ConfigError
from laminar_py.data.tokenizer import Tokenizer, load_tokenizer


class _ModelPart(msgspec.Struct, frozen=True):
    path: str


class _DataPart(msgspec.Struct, frozen=True):
    solved_at: float = 1.0


class _RunYaml(msgspec.Struct, frozen=True):
    model: _ModelPart
    data: _DataPart = _DataPart()


class _EvalOrigin(msgspec.Struct, frozen=True):
    """Source of an evaluation: `runs/<name>-<n>/checkpoints/<step>`, or a model folder."""

    path: str


@dataclass(frozen=True, slots=True)
class RunModel:
    """Tokenizer of a run's model, or why there is none, in one line; and the reward that solves a problem."""

    tokenizer: Tokenizer | None
    why: str
    solved_at: float


def find_model(run: Path, model: Path | None) -> RunModel:
    """The model of a run folder, with the tokenizer of the folder `model` if one is named.

    Raises `ConfigError` only where that has no tokenizer: a run can be read without.
    """
    try:
        config = _read_config(run)
    except ConfigError as error:
        solved_at = _DataPart().solved_at
        return RunModel(None, str(error), solved_at) if model is None else RunModel(_load(model), "", solved_at)
    if model is not None:
        return RunModel(_load(model), "", config.data.solved_at)
    whys = []
    for folder in (Path(config.model.path), *_evaluated(run)):
        try:
            return RunModel(_load(folder), "", config.data.solved_at)
        except ConfigError as error:
            whys.append(str(error))
    return RunModel(None, whys[0], config.data.solved_at)


def _read_config(run: Path) -> _RunYaml:
    path = run / "config.yaml"
    try:
        return msgspec.convert(yaml.safe_load(path.read_text()), _RunYaml)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        words = " ".join(str(error).split())
        raise ConfigError(f"config={path}: does not name a model ({words}); name its folder") from None


def _evaluated(run: Path) -> Iterator[Path]:
    """Model folder of the run whose checkpoint was evaluated: the folder that was made of it is gone."""
    try:
        source = msgspec.json.decode((run / "source.json").read_bytes(), type=_EvalOrigin)
        yield Path(_read_config(Path(source.path).parents[1]).model.path)
    except (OSError, IndexError, msgspec.DecodeError, ConfigError):
        return


def _load(folder: Path) -> Tokenizer:
    """The tokenizer of a folder; of a large vocabulary it takes a second, so a few are kept while files last."""
    try:
        changed = (folder / "tokenizer.json").stat().st_mtime_ns
    except OSError:
        changed = 0
    return _load_once(folder.absolute(), changed) if changed else load_tokenizer(folder)


@lru_cache(maxsize=4)
def _load_once(folder: Path, changed_ns: int) -> Tokenizer:
    """`changed_ns` is when its file was written: another file is another tokenizer."""
    return load_tokenizer(folder)
