"""Files of TRL and verl as settings of ours, by the table in `laminar_lab.init.counterparts`.

TRL's file is the YAML of `trl grpo --config`. verl's is Hydra YAML, or a script or text with overrides.
"""

import re
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from string import Template

import yaml

from laminar_lab.init.conversions import Given, MissingTermError, NoCounterpartError, trl_prompts
from laminar_lab.init.counterparts import COUNTERPARTS, DEFAULTS, EPOCHS
from laminar_py.config import ConfigError
from laminar_py.config.loading import read_tree, read_yaml
from laminar_py.config.their_names import WITHOUT, OtherTrainer, their_names

YAML = (".yaml", ".yml")
PROCESSES = "num_processes"  # of `accelerate launch`
REWARD = "reward.use"
MISSPELT = 0.88  # least likeness (1: equal) of a misspelt key to a known one
NOTHING: tuple[object, ...] = (None, "", [], 0)
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_FALLBACK = re.compile(r"\$\{(\w+):-([^{}]*)\}")  # ${NAME:-value} of a shell


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Settings of a foreign file, e.g. `learning_rate: 1e-6` as `{"learner.lr": 1e-6}`."""

    settings: dict[str, object]  # our dotted name -> value
    lost: dict[str, str]  # their name=value -> why there is no counterpart; "" if unknown
    epochs: float | None  # where the file counts epochs, not steps
    terms: str = ""  # why a term of the reward is missing or has to be adapted; "" where all are complete
    is_missing: bool = False  # True if a term is missing, so that a run would train on the others alone
    batch: str = ""  # how TRL's batch was counted


def translate(trainer: OtherTrainer, path: Path, *, processes: int = 1) -> Translation:
    """Translate a file for so many `processes` of TRL, unless the file names their number.

    Raises `ConfigError` if it cannot be read, has a misspelt key, or no setting of the trainer.
    """
    given = read_given(trainer, path)
    full = DEFAULTS[trainer] | given
    batch = ""
    if trainer is OtherTrainer.TRL and PROCESSES not in given:
        full[PROCESSES] = processes
        batch = _describe_batch(full, processes)
    known = {name for key in COUNTERPARTS for name in their_names(key, trainer)}
    _refuse_misspelt(trainer, path, given, known)
    if not known & set(given):
        raise ConfigError(f"--from {trainer} {path}: has no setting of {trainer} that is known here; name another")
    settings, lost, faults = _convert(trainer, given, full)
    others = [
        name
        for name, value in given.items()
        if name not in known and name != EPOCHS[trainer] and (value is False or value not in NOTHING)
    ]
    lost |= {f"{name}={given[name]}": _reason(trainer, name) for name in others}
    if _cuts(settings):
        settings["rollout.record"] = ["sampling_mask"]
    epochs = None if "steps" in settings else full.get(EPOCHS[trainer])
    terms = faults.get(REWARD)
    return Translation(
        settings=settings,
        lost=lost,
        epochs=None if epochs is None else float(str(epochs)),
        terms="" if terms is None else str(terms),
        is_missing=isinstance(terms, MissingTermError),
        batch=batch,
    )


def _convert(
    trainer: OtherTrainer, given: Given, full: Given
) -> tuple[dict[str, object], dict[str, str], dict[str, NoCounterpartError]]:
    """Return our settings, their settings that are lost, each with its reason, and the errors by our setting."""
    settings: dict[str, object] = {}
    lost: dict[str, str] = {}
    faults: dict[str, NoCounterpartError] = {}
    for key, row in COUNTERPARTS.items():
        names = their_names(key, trainer)
        if not any(name in full for name in names):
            continue
        try:
            value = row.convert(trainer)(full, names)
        except NoCounterpartError as error:
            value, faults[key] = error.instead, error
            if key == REWARD:  # has a line of its own
                names = ()
            lost |= {f"{name}={given[name]}": str(error) for name in names if name in given} or {
                f"{name}={full[name]} (the default)": str(error) for name in names if name in full
            }
        if value is not None:
            settings[key] = value
    return settings, lost, faults


def _describe_batch(full: Given, processes: int) -> str:
    """Describe how prompts of a step are counted, where the file does not name the number of processes."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    try:
        prompts = trl_prompts(full, ())
    except NoCounterpartError:
        return ""
    whose = "--on has as many GPUs" if processes > 1 else "the file does not name more"
    product = " x ".join(f"{name}={full[name]}" for name in names)
    return (
        f"{product} on {processes} process{'es' * (processes > 1)} ({whose}): rollout.prompts_per_step={prompts};"
        " set it if you ran another number"
    )


def _refuse_misspelt(trainer: OtherTrainer, path: Path, given: Given, known: Collection[str]) -> None:
    """Raise `ConfigError` for a key that is nearly one of the trainer's, in the same section."""
    every = {*known, *WITHOUT[trainer], EPOCHS[trainer]}
    for name in given:
        section, _, key = name.rpartition(".")
        beside = {full.rpartition(".")[2]: full for full in every if full.rpartition(".")[0] == section}
        if name not in every and (near := get_close_matches(key, beside, n=1, cutoff=MISSPELT)):
            raise ConfigError(
                f"--from {trainer} {path}: {name}={given[name]}: unknown; did you mean {beside[near[0]]}? Mend it"
            )


def _reason(trainer: OtherTrainer, name: str) -> str:
    """Return why a setting has no counterpart; "" if the table does not say."""
    below = (why for key, why in WITHOUT[trainer].items() if key.endswith(".") and name.startswith(key))
    return WITHOUT[trainer].get(name) or next(below, "")


def drop_cut(settings: dict[str, object]) -> dict[str, str]:
    """Remove a cut of the vocabulary that SGLang cannot record, and return it as lost: it needs a `top_k`."""
    if "rollout.record" not in settings or settings.get("rollout.sampling.top_k"):
        return {}
    del settings["rollout.record"]
    names = [name for name in ("top_p", "min_p") if f"rollout.sampling.{name}" in settings]
    values = {name: settings.pop(f"rollout.sampling.{name}") for name in names}
    return {
        f"{name}={value}": "SGLang records a cut only beside top_k; none is made" for name, value in values.items()
    }


def _cuts(settings: dict[str, object]) -> bool:
    """Return whether tokens are sampled from a part of the vocabulary, which the learner must know."""
    top_p, others = settings.get("rollout.sampling.top_p", 1), ("top_k", "min_p")
    return top_p not in (1, 1.0) or any(settings.get(f"rollout.sampling.{name}") for name in others)


def read_given(trainer: OtherTrainer, path: Path) -> dict[str, object]:
    """Read a file's settings by dotted name; without values that are missing or refer to others."""
    if trainer is OtherTrainer.VERL and path.suffix not in YAML:
        given = _overrides(path)
    else:
        tree = {key: _with_booleans(value) for key, value in read_tree(path, []).items()}
        given = tree if trainer is OtherTrainer.TRL else dict(_flat(tree, ""))
    return {name: value for name, value in given.items() if not _is_open(value)}


def _is_open(value: object) -> bool:
    return value is None or (isinstance(value, str) and (value == "???" or "$" in value))


def _flat(tree: Given, prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _overrides(path: Path) -> dict[str, object]:
    """Read `name.sub=value` words of a script or text, with the script's own variables."""
    try:
        words = shlex.split(path.read_text().replace("\\\n", " "), comments=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--from verl {path}: cannot be read ({error}); name a YAML file or a script") from None
    variables = {"HOME": str(Path.home())}
    given: dict[str, object] = {}
    for word in words:
        text = Template(_FALLBACK.sub(r"\2", word)).safe_substitute(variables)
        if found := _OVERRIDE.fullmatch(text):
            given[found[1]] = _value(found[2])
        elif found := _VARIABLE.fullmatch(text):
            variables[found[1]] = found[2]
    return given


def _value(text: str) -> object:
    try:
        return _with_booleans(read_yaml(text))
    except yaml.YAMLError:
        return text


_BOOLEANS = {"yes": True, "on": True, "no": False, "off": False}


def _with_booleans(value: object) -> object:
    """Return a value of YAML 1.1, which TRL and verl read: `on` is true there."""
    if isinstance(value, dict):
        return {key: _with_booleans(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_booleans(one) for one in value]
    return _BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value
