"""Checks of a resume: the checkpoint that it goes back to, and whether it has the problems of the run on record.

Called by `launch`. The record names problems by their rows and by their ids, so each must still be the same.
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

MOST = 1000  # prompts that are made again; another tokenizer or template shows in most, a task in its own


def refuse_simulated(run: RunFolder) -> None:
    """Refuse the record of a simulation, which has no weights to go on from. Raises `ConfigError`."""
    started = last_start(run.live_ledger)
    if started is not None and started.simulated:
        raise ConfigError(
            f"run={run.path}: was simulated, and nothing was trained in it; start a run of its config"
        )


def refuse_other_rows(run: RunFolder, digests: dict[str, str]) -> None:
    """Refuse rows that are others than those that a run's places and ids are of. Raises `ConfigError`.

    Evaluation sets may come and go.
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

    Prompts on record are made again, a sample of `MOST` that is spread over all. Raises `ConfigError`.
    """
    evaluated = {prompt.id: prompt for prompts in inputs.sets.values() for prompt in prompts}
    for known in known_prompts(run.live_ledger, most=MOST):
        now = inputs.stream.find(known.id) or evaluated.get(known.id)
        if now is not None and not is_same(known, now):
            change = tell_change(known, now, inputs.tokenizer, config, began=load_config(run.config, []))
            raise ConfigError(f"{change} than when {run.path} began; bring that back, or start a new run")


def tell_fallback(run: RunFolder, console: Console) -> None:
    """Say so if the newest checkpoint of a run to resume is gone, and which one is taken.

    Raises `ConfigError` if that one cannot be, or if there is none any more.
    """
    found = find_checkpoint(run)
    if found is not None and (newest := on_record(run)[0]) != found:
        console.print(
            f"{newest.path} is gone: the run goes back to step {found.step}, {found.path}",
            soft_wrap=True,
            highlight=False,
        )


def is_same(known: Prompt, now: Prompt) -> bool:
    """True where a prompt on record is made as it was: text, ids and task."""
    return (known.text, known.task) == (now.text, now.task) and np.array_equal(known.ids, now.ids)


def tell_change(known: Prompt, now: Prompt, tokenizer: Tokenizer, config: RunConfig, *, began: RunConfig) -> str:
    """Words on what makes another prompt: the setting whose change explains it, and no other.

    A tokenizer shows by what it makes of the text on record, a setting of `data.chat` by the config that the run
    `began` with, a row by a text that no template has written. What is left is the template itself.
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
    """True where a tokenizer makes the ids on record of the text on record, as of a template or as it stands."""
    made = (tokenizer.encode(known.text), tokenizer.encode_prompt(known.text))
    return any(np.array_equal(ids, known.ids) for ids in made)
