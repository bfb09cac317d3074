"""Checks of a resume: the run has a usable checkpoint, and settings and data still make the draws on record.

Called by `launch`; the controller records the overrides of a resume.
The record names prompts by their rows and ids, so each row must still make the same prompt.
"""

import json
from collections.abc import Sequence

import numpy as np
from rich.console import Console

from laminar_py.config.loading import dump_config, flatten, load_config, to_overrides
from laminar_py.config.rollout import StalePolicy
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.control.settings import ControlSettings
from laminar_py.ledger.database import reading
from laminar_py.ledger.evaluations import open_passes, read_evaluations
from laminar_py.ledger.recovery import is_simulated, known_prompts, last_start
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.host import counted, write_file
from laminar_py.records.trajectory import Prompt
from laminar_py.runtime.orchestrator.checkpoints import find_checkpoint, on_record
from laminar_py.runtime.preflight.inputs import Inputs

MOST = 1000  # prompts to compare; another tokenizer or template changes most of them
# decide which problem comes, what the record of a response means, and the weights that RL begins with
FIXED = (
    "seed",
    "data.",
    "environment.kind",
    "model.from_scratch",
    "warm_start.",
    "learner.lora.",
    "rollout.record",
    "rollout.sampling.temperature",  # at which the learner computes log-probabilities on record again
)
# files may move: digests, prompts and fingerprints tell whether they are the same
MOVABLE = ("data.train", "data.prepare", "warm_start.data.path", "warm_start.cache")


def refuse_other_draws(run: RunFolder, config: RunConfig) -> None:
    """Raise `ConfigError` for a setting that decided the draws on record and has changed since the run began."""
    began, now = _draws(load_config(run.config, [])), _draws(config)
    changed = next((name for name in began | now if began.get(name) != now.get(name)), None)
    if changed is not None:
        (setting,) = to_overrides({changed: now.get(changed)})
        raise ConfigError(
            f"{setting}: {run.path} began with {json.dumps(began.get(changed))}, and its record was drawn with"
            " that; leave the setting out, or start a new run"
        )


def _draws(config: RunConfig) -> dict[str, object]:
    """Return the `FIXED` settings of a config by name, with the weights of the training sources."""
    settings = {name: value for name, value in flatten(config).items() if not name.startswith(MOVABLE)}
    weights = {"data.train.weight": [source.weight for source in config.data.train]}
    return weights | {name: value for name, value in settings.items() if name.startswith(FIXED)}


def refuse_simulated(run: RunFolder) -> None:
    """Refuse a simulated run, which has no weights to continue from. Raises `ConfigError`."""
    with reading(run.ledger) as connection:
        if is_simulated(connection):
            raise ConfigError(
                f"run={run.path}: is a simulation, which trained no weights; start a new run with its config"
            )


def refuse_other_rows(run: RunFolder, digests: dict[str, str]) -> None:
    """Raise `ConfigError` if problems, demonstrations or a kept evaluation set have other rows than at the start.

    `digests` has a digest of the rows by config field. Evaluation sets may be added and removed.
    """
    with reading(run.ledger) as connection:
        started = last_start(connection)
    known = started.data if started else {}
    fields = [name for name in known | digests if name.startswith("data.train") or name in known.keys() & digests]
    changed = next((name for name in fields if known and known.get(name) != digests.get(name)), None)
    if changed is not None:
        raise ConfigError(
            f"{changed}: has other rows than when {run.path} began, whose record and weights come from these rows;"
            " bring the earlier rows back, or start a new run"
        )


def refuse_other_prompts(run: RunFolder, inputs: Inputs) -> None:
    """Raise `ConfigError` if a row now has another text, task or token ids than its prompt on record.

    Compares at most `MOST` prompts on record; a prompt whose row is gone is skipped.
    """
    evaluated = {prompt.id: prompt for prompts in inputs.sets.values() for prompt in prompts}
    for known in known_prompts(run.ledger, most=MOST):
        now = inputs.stream.find(known.id) or evaluated.get(known.id)
        if now is not None and (change := _change(known, now)) is not None:
            raise ConfigError(
                f"run={run.path}: prompt {known.id} has {change} than when the run began; bring back the rows,"
                " data.chat and model.path with its tokenizer and chat template, or start a new run"
            )


def print_fallback(run: RunFolder, console: Console) -> None:
    """Print the checkpoint that a run resumes from if its newest is gone. Raises `ConfigError` without any."""
    usable = find_checkpoint(run)
    if usable is not None and (newest := on_record(run)[0]) != usable:
        console.print(
            f"{newest.path} is gone: the run goes back to step {usable.step}, {usable.path}",
            soft_wrap=True,
            highlight=False,
        )


def describe_resume(run: RunFolder, config: RunConfig) -> str:
    """Return the step at which a run with this config continues, in words."""
    checkpoint = find_checkpoint(run) if run.has_ledger else None
    step = 0 if checkpoint is None else checkpoint.step
    if step < config.steps:
        return f"goes on at step {step + 1} of {config.steps}"
    left = "nothing is left to do" if is_over(run, config) else "only evaluations are left"
    return f"has made its {counted(step, 'step')}, and {left}"


def is_over(run: RunFolder, config: RunConfig) -> bool:
    """Return whether a run with this config has made all steps and evaluations, so that it may end at once."""
    checkpoint = find_checkpoint(run) if run.has_ledger else None
    if checkpoint is None or checkpoint.step < config.steps:
        return False
    done = {result.set_name for result in read_evaluations(run.ledger) if result.step == checkpoint.step}
    return done >= config.eval.sets.keys() and not open_passes(run.ledger)


def describe_surplus(settings: ControlSettings, groups: int) -> str:
    """Return a line if a resume has more live groups than its own, smaller steps would begin; "" if it has not.

    E.g. 24 groups of a run with 8 prompts a step, resumed with 2, are the data of 12 steps.
    """
    admission, bound = settings.admission, settings.bound
    steps = groups // admission.batch
    if groups <= admission.limit or steps < 2:
        return ""
    line = (
        f"{groups} groups of the run so far are ready or under way: its next {steps} steps take"
        f" {admission.batch} of them each before any new data, the last ones on data about {steps - 1} steps old"
    )
    if bound.max_staleness is None or bound.max_staleness >= steps - 1:
        return line
    if StalePolicy.DROP in bound.policies:
        return f"{line}; beyond staleness.max_staleness={bound.max_staleness} groups are dropped"
    more = (
        "a larger rollout.prompts_per_step uses them sooner, and staleness.policies='[wait, drop]' drops what is"
        " too old"
    )
    return f"{line}, above staleness.max_staleness={bound.max_staleness}; {more}"


def record_overrides(run: RunFolder, overrides: Sequence[str]) -> None:
    """Write the overrides of a resume into the run's `config.yaml`, which reports and later resumes read.

    Call it once the learner has started: wrong overrides must not keep the run from its next resume. The fleet of
    `laminar scale` stays in the ledger alone.
    """
    partial = run.config.with_suffix(".tmp")
    write_file(partial, dump_config(load_config(run.config, list(overrides))).encode())
    partial.replace(run.config)  # a crash leaves one of the two


def _change(known: Prompt, now: Prompt) -> str | None:
    """Return words for the difference of `now` to the `known` prompt on record; None if they are equal."""
    if known.task != now.task:
        return f"another task, {now.task!r} and not {known.task!r},"
    if known.text != now.text:
        return "another text"
    return None if np.array_equal(known.ids, now.ids) else "other token ids of the same text"
