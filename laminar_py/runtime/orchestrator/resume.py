"""Checks of a resume: the checkpoint that the run goes back to, and whether its prompts are those on record.

Called by `launch`. The record names prompts by their rows and ids, so each must still be the same.
"""

import numpy as np
from rich.console import Console

from laminar_py.config.loading import load_config
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.data.sources import raw_fields
from laminar_py.data.tokenizer import Tokenizer
from laminar_py.ledger.recovery import known_prompts, last_start
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.trajectory import Prompt
from laminar_py.runtime.orchestrator.checkpoints import find_checkpoint, on_record
from laminar_py.runtime.preflight.inputs import Inputs

MOST = 1000  # prompts to compare; another tokenizer or template changes most of them


def refuse_simulated(run: RunFolder) -> None:
    """Refuse a simulated run, which has no weights to continue from. Raises `ConfigError`."""
    started = last_start(run.live_ledger)
    if started is not None and started.simulated:
        raise ConfigError(
            f"run={run.path}: was simulated, and nothing was trained in it; start a run of its config"
        )


def refuse_other_rows(run: RunFolder, digests: dict[str, str]) -> None:
    """Refuse data with other rows than the run began with. Raises `ConfigError`.

    Evaluation sets may be added and removed.
    """
    started = last_start(run.live_ledger)
    known = started.data if started else {}
    fields = [name for name in known | digests if name.startswith("data.train") or name in known.keys() & digests]
    changed = next((name for name in fields if known and known.get(name) != digests.get(name)), None)
    if changed is not None:
        raise ConfigError(
            f"{changed}: has other rows than when {run.path} began, whose record names problems by their rows;"
            " bring these back, or start a new run"
        )


def refuse_other_prompts(run: RunFolder, inputs: Inputs, config: RunConfig) -> None:
    """Refuse a tokenizer, a chat template or a task that makes other prompts of the same rows.

    Compares at most `MOST` prompts on record with newly made ones. Raises `ConfigError`.
    """
    evaluated = {prompt.id: prompt for prompts in inputs.sets.values() for prompt in prompts}
    for known in known_prompts(run.live_ledger, most=MOST):
        now = inputs.stream.find(known.id) or evaluated.get(known.id)
        if now is not None and not is_same(known, now):
            change = describe_change(known, now, inputs.tokenizer, config, began=load_config(run.config, []))
            raise ConfigError(f"{change} than when {run.path} began; bring that back, or start a new run")


def print_fallback(run: RunFolder, console: Console) -> None:
    """Print which checkpoint a run resumes from, if its newest one is gone.

    Raises `ConfigError` if no checkpoint is usable.
    """
    found = find_checkpoint(run)
    if found is not None and (newest := on_record(run)[0]) != found:
        console.print(
            f"{newest.path} is gone: the run goes back to step {found.step}, {found.path}",
            soft_wrap=True,
            highlight=False,
        )


def is_same(known: Prompt, now: Prompt) -> bool:
    """Return True if a prompt has the same text, ids and task as on record."""
    return (known.text, known.task) == (now.text, now.task) and np.array_equal(known.ids, now.ids)


def describe_change(
    known: Prompt, now: Prompt, tokenizer: Tokenizer, config: RunConfig, *, began: RunConfig
) -> str:
    """Name the setting whose change explains why a prompt differs from the record.

    The tokenizer changed if it makes other ids of the text on record; `data.chat` if it differs from the config
    that the run `began` with; the row if no template wrote the text. Otherwise the template itself changed.
    """
    model = f"model.path={config.model.path}"
    if began.model.path != config.model.path:
        model += f" (before: {began.model.path})"
    if known.task != now.task:
        return (
            f"data.train, or eval.sets: prompt {known.id} has another task, {now.task!r} and not {known.task!r},"
        )
    if known.text == now.text or not _makes_ids(tokenizer, known):
        return f"{model}: its tokenizer makes other ids of prompt {known.id}"
    if began.data.chat != config.data.chat:
        return f"data.chat: writes prompt {known.id} otherwise"
    if not (config.data.chat.texts or "messages" in raw_fields(now.fields_json)):
        return f"data.train, or eval.sets: the row of prompt {known.id} reads otherwise"
    return f"{model}: its chat template writes prompt {known.id} otherwise"


def _makes_ids(tokenizer: Tokenizer, known: Prompt) -> bool:
    """Return True if a tokenizer makes the ids on record of the text on record, as a template or plain text."""
    made = (tokenizer.encode(known.text), tokenizer.encode_prompt(known.text))
    return any(np.array_equal(ids, known.ids) for ids in made)
