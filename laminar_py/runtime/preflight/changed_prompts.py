"""Prompts on record that would be made otherwise now, and what has changed since. Pure; for a resume."""

import numpy as np

from laminar_py.config.run import RunConfig
from laminar_py.data.sources import raw_fields
from laminar_py.data.tokenizer import Tokenizer
from laminar_py.records.trajectory import Prompt


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
