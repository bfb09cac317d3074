"""Prompts: files of problems, and the endless seeded stream that the dispatcher draws groups from.

Owns the order of prompts. A place in the stream is one integer, so a resumed run goes on where the ledger says
it stopped, and any prompt that was lost can be asked for again. Invariant: the same files, seed and index
always give the same prompt.
"""

from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np

from laminar_py.data.jsonl import JsonlFile, other_fields, read_jsonl
from laminar_py.data.tokenizer import Tokenizer
from laminar_py.records.codec import IntArray
from laminar_py.records.trajectory import Prompt

CACHED_EPOCHS = 8  # a lost prompt of an older epoch costs one permutation


class _PromptLine(msgspec.Struct, frozen=True):
    prompt: str
    answer: str = ""
    id: str | None = None
    task: str = ""


def read_prompts(source: JsonlFile, *, tokenizer: Tokenizer, max_prompt_tokens: int) -> list[Prompt]:
    """Every line of a prompt file, checked, with all its fields; `index` is its row, `id` defaults to `p<row>`.

    `max_prompt_tokens` is what `rollout.max_len` leaves beside a whole response. Raises `ConfigError` on the
    first line that has a fault.
    """
    prompts: list[Prompt] = []
    rows: dict[str, int] = {}  # id -> row
    for row, line, text in read_jsonl(source, _PromptLine):
        name = f"p{row}" if line.id is None else line.id
        first = rows.setdefault(name, row)
        if first != row:
            raise source.error(
                row, f"id also in line {first + 1}", value=name, remedy="give each line its own id, or none an id"
            )
        ids = tokenizer.encode_prompt(line.prompt)
        _check_length(source, row, text=line.prompt, num_tokens=len(ids), limit=max_prompt_tokens)
        fields = other_fields(text, _PromptLine)
        prompts.append(
            Prompt(
                id=name,
                index=row,
                text=line.prompt,
                ids=ids,
                answer=line.answer,
                task=line.task,
                fields_json=fields,
            )
        )
    return prompts


def _check_length(source: JsonlFile, row: int, *, text: str, num_tokens: int, limit: int) -> None:
    if not num_tokens:
        raise source.error(row, "prompt is empty", value=text, remedy="write a prompt or remove the line")
    if num_tokens > limit:
        raise source.error(
            row,
            f"prompt has {num_tokens} tokens, above the {limit} that a response leaves of rollout.max_len,",
            value=text,
            remedy="raise rollout.max_len or shorten the prompt",
        )


def check_disjoint(
    heldout: Sequence[Prompt], train: Sequence[Prompt], *, sources: tuple[JsonlFile, JsonlFile]
) -> None:
    """No held-out prompt is trained on. `sources` are those of `heldout` and `train`. Raises `ConfigError`."""
    trained = {prompt.text: prompt for prompt in train}
    for prompt in heldout:
        if prompt.text in trained:
            raise sources[0].error(
                prompt.index,
                f"prompt also in {sources[1].place(trained[prompt.text].index)}",
                value=prompt.text,
                remedy="remove it from one of the two files",
            )


def first_of_tasks(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of each task that is named, or of the only one."""
    return list({prompt.task: prompt for prompt in reversed(prompts)}.values())[::-1]


class PromptStream:
    """Prompts without end: epoch after epoch, each a permutation of all rows of its own.

    With 3 rows and seed 0, places 0 to 2 hold every row once, and so do 3 to 5 in another order. Places may be
    asked for in any order; each costs O(1) once its epoch has been seen.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        assert prompts, "a stream needs a prompt"
        self.first_of_tasks = first_of_tasks(prompts)
        self._prompts = prompts
        self._seed = seed
        self._order = lru_cache(maxsize=CACHED_EPOCHS)(self._permute)

    def prompt(self, index: int) -> Prompt:
        """The prompt at place `index` >= 0 of the stream; its id is its row's, the same in every epoch."""
        epoch, place = divmod(index, len(self._prompts))
        prompt: Prompt = msgspec.structs.replace(self._prompts[self._order(epoch)[place]], index=index)
        return prompt

    def _permute(self, epoch: int) -> IntArray:
        rows = np.arange(len(self._prompts), dtype=np.int32)
        np.random.default_rng((self._seed, epoch)).shuffle(rows)
        return rows
