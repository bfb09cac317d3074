"""Problems of a source, read and checked. Called by `preflight` and `laminar data`."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from laminar_py.data.chat import REMEDY, PromptEncoder, TemplateError, Turn
from laminar_py.data.problems import ProblemRow, ProblemSet, asked, text_key
from laminar_py.data.sources import DataSource, read_records, written_field
from laminar_py.records.trajectory import Prompt

BATCH = 1000  # rows whose prompts are tokenized at a time
KNOWN = 1 << 16  # prompts that are not written again: sets may repeat theirs many times
T = TypeVar("T")
Row = tuple[int, ProblemRow, bytes]
Given = str | bytes  # prompt as a row has it: text, or JSON of messages


def read_prompts(
    source: DataSource, *, encoder: PromptEncoder, max_prompt_tokens: int | None, prefix: str = ""
) -> ProblemSet:
    """Every problem of a source, checked, with all its fields.

    Ids begin with `prefix`, and without one of its own a problem is `p<row>`. `max_prompt_tokens` is what
    `rollout.max_len` leaves beside a whole response. Raises `ConfigError` on a row that has a fault.
    """
    problems = ProblemSet(source, encoder=encoder, prefix=prefix)
    keys: dict[Given, int] = {}
    for batch in _batches(read_records(source, ProblemRow), BATCH):
        given = [_given(source, *row) for row in batch]
        new = {one: row for one, row in zip(given, batch, strict=True) if one not in keys}
        keys.update(zip(new, _checked(source, new, encoder=encoder, limit=max_prompt_tokens), strict=True))
        for one, row in zip(given, batch, strict=True):
            problems.add(*row, key=keys[one])
        if len(keys) > KNOWN:
            keys.clear()
    problems.check_names()
    return problems


def _checked(
    source: DataSource, rows: "dict[Given, Row]", *, encoder: PromptEncoder, limit: int | None
) -> list[int]:
    """Keys of prompts, which are neither empty nor too long. Only those that may be are tokenized."""
    keys: list[int] = []
    doubtful: list[tuple[Given, int, str | list[Turn], str]] = []
    for one, (row, line, written) in rows.items():
        try:
            text = encoder.write(prompt := asked(line, written))
        except TemplateError as error:
            raise source.error(row, str(error), value=written, remedy=REMEDY) from None
        most = encoder.tokenizer.at_most(text)
        if not text or most is None or (limit is not None and most > limit):
            doubtful.append((one, row, prompt, text))
        keys.append(text_key(text))
    lengths = encoder.count([prompt for _, _, prompt, _ in doubtful], [text for *_, text in doubtful])
    for (one, row, _, _), num_tokens in zip(doubtful, lengths, strict=True):
        _check_length(source, row, text=one, num_tokens=num_tokens, limit=limit)
    return keys


def _given(source: DataSource, row: int, line: ProblemRow, written: bytes) -> Given:
    if isinstance(line.prompt, str):
        return line.prompt
    if line.prompt is None and line.messages is None:
        remedy = f"write one, or name the column that has it in {source.field}.columns"
        raise source.error(row, "missing required field `prompt`", value=written, remedy=remedy)
    return written_field(written, "messages" if line.prompt is None else "prompt").encode()


def _check_length(source: DataSource, row: int, *, text: Given, num_tokens: int, limit: int | None) -> None:
    if not num_tokens:
        raise source.error(row, "prompt is empty", value=text, remedy="write a prompt or remove the line")
    if limit is not None and num_tokens > limit:
        raise source.error(
            row,
            f"prompt has {num_tokens} tokens, above the {limit} that a response leaves of rollout.max_len,",
            value=text,
            remedy="raise rollout.max_len or shorten the prompt",
        )


def check_disjoint(heldout: ProblemSet, train: Sequence[ProblemSet]) -> None:
    """No held-out prompt is trained on, as it is written for the model. Raises `ConfigError`."""
    leaks = find_leaks(heldout, train)
    if leaks:
        place, there = leaks[0]
        more = f" ({len(leaks)} problems in all; `laminar data` counts them)" if len(leaks) > 1 else ""
        raise heldout.source.error(
            heldout.row(place),
            f"prompt also in {there}{more}",
            value=heldout.text(place),
            remedy="remove it from one of the two",
        )


def find_leaks(heldout: ProblemSet, train: Sequence[ProblemSet]) -> list[tuple[int, str]]:
    """Places of held-out problems whose prompt reads as that of one to train on, with where that stands.

    White space may differ (`problems.folded`).
    """
    leaks = []
    for place in range(len(heldout)):
        text = heldout.text(place)
        found = ((problems, problems.find_prompt(text)) for problems in train)
        there = next((problems.source.place(problems.row(at)) for problems, at in found if at is not None), None)
        if there is not None:
            leaks.append((place, there))
    return leaks


def first_of_tasks(sets: Iterable[ProblemSet]) -> list[Prompt]:
    """The first problem of each task that is named, or of the only one."""
    first: dict[str, Prompt] = {}
    for problems in sets:
        for task, place in problems.tasks.items():
            if task not in first:
                first[task] = problems[place]
    return list(first.values())


def _batches(rows: Iterator[T], number: int) -> Iterator[list[T]]:
    while batch := list(islice(rows, number)):
        yield batch
