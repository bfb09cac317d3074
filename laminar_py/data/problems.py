"""Problems of a source in little memory: their rows, one after another, of which prompts are made when asked for.

Filled by `prompts`, drawn from by `stream`, looked at by `preflight` and `survey`. Invariant: a place always gives
the same problem, and its prompt was written once, with the length that is kept of it.
"""

import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from typing import TypeVar

import msgspec
import numpy as np

from laminar_py.config.section import ConfigError
from laminar_py.data.chat import REMEDY, Message, PromptEncoder, TemplateError, Turn, read_turns
from laminar_py.data.sources import DataSource, other_fields, raw_fields, read_records, written_field
from laminar_py.records.codec import IntArray
from laminar_py.records.trajectory import Prompt


class HashIndex:
    """Places by hash, in order, e.g. of `[7, 3, 7]` places 0 and 2 by 7; what stands there is to be compared."""

    def __init__(self, hashes: Sequence[int]) -> None:
        given = np.array(hashes, dtype=np.int64)
        self._order = np.argsort(given, kind="stable").astype(np.int32)  # [n] places
        self._hashes = given[self._order]  # [n] of them, sorted

    def places(self, hash: int) -> IntArray:
        """[m] places that have this hash."""
        begin, end = (np.searchsorted(self._hashes, hash, side=side) for side in ("left", "right"))
        return self._order[begin:end]

    def repeats(self) -> IntArray:
        """[r, 2] places whose hash stands before, in order, each after the last one where it does."""
        again = self._hashes[1:] == self._hashes[:-1]
        pairs = np.stack([self._order[1:][again], self._order[:-1][again]], axis=1)
        ordered: IntArray = pairs[np.argsort(pairs[:, 0])]
        return ordered


BATCH = 1000  # prompts that are tokenized at a time
OWN_FIELDS = ("prompt", "answer", "id", "task")  # all others go to the reward as they are
NO_IDS = np.array([], dtype=np.int32)


class ProblemRow(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a row that are looked at; `prompt` or `messages` is there."""

    prompt: str | list[Message] | None = None
    messages: list[Message] | None = None
    answer: str | int | float | None = None
    id: str | int | None = None
    task: str | None = None


class ProblemSet:
    """Problems of one source, e.g. 1,000,000 in 0.4 GB.

    `tasks` has the place of the first problem of each task; ids begin with `prefix`.
    """

    def __init__(self, source: DataSource, *, encoder: PromptEncoder, prefix: str = "") -> None:
        self.source = source
        self.tasks: dict[str, int] = {}
        self.encoder = encoder
        self._prefix = prefix
        self._written = bytearray()  # rows as JSON
        self._ends = array("q", [0])  # [n + 1] of rows in it
        self._rows = array("q")  # [n] numbers of rows in the source, where blank lines count
        self._keys = array("q")  # [n] `text_key` of prompts
        self._names = array("q")  # [n] hashes of ids, without the prefix
        self._digest = blake2b(digest_size=16)

    def add(self, row: int, line: ProblemRow, written: bytes, *, key: int) -> None:
        """Append a row, whose prompt has this `text_key`."""
        self.tasks.setdefault(self._task(line), len(self))
        self._names.append(hash(_name(row, line, written)))
        self._written += written
        self._ends.append(len(self._written))
        self._rows.append(row)
        self._keys.append(key)
        self._digest.update(b"%d " % row + written)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, place: int) -> Prompt:
        """The problem at a place; its `index` is its row."""
        _, line, written = self._at(place)
        text, ids = self.encoder.encode(asked(line, written))
        return msgspec.structs.replace(self.without_prompt(place), text=text, ids=ids)

    def stated(self, place: int) -> Prompt:
        """A problem as its reward sees it, with neither text nor ids of its prompt, which cost most."""
        row, line, written = self._at(place)
        return Prompt(
            id=self._prefix + _name(row, line, written),
            index=row,
            text="",
            ids=NO_IDS,
            answer=_text(written, "answer", line.answer),
            task=self._task(line),
            fields_json=_fields(line, written),
        )

    def row(self, place: int) -> int:
        """Number of a problem's row in its source."""
        return self._rows[place]

    def id(self, place: int) -> str:
        """Id of a problem."""
        return self._prefix + _name(*self._at(place))

    def text(self, place: int) -> str:
        """Prompt of a problem as the model gets it."""
        _, line, written = self._at(place)
        return self.encoder.write(asked(line, written))

    def find(self, id: str) -> int | None:
        """Place of the problem that has an id; None where none has."""
        if not id.startswith(self._prefix):
            return None
        candidates = self._by_name.places(hash(id[len(self._prefix) :])).tolist()
        return next((place for place in candidates if self.id(place) == id), None)

    def find_prompt(self, text: str) -> int | None:
        """Place of a problem with a prompt that reads the same; None where none does."""
        candidates = self._by_key.places(text_key(text)).tolist()
        return next((place for place in candidates if folded(self.text(place)) == folded(text)), None)

    def check_names(self) -> None:
        """No id stands twice. Raises `ConfigError`."""
        for place, first in self._by_name.repeats().tolist():
            if (id := self.id(place)) == self.id(first):
                raise self.source.error(
                    self.row(place),
                    f"id also in line {self.row(first) + 1}",
                    value=id.removeprefix(self._prefix),
                    remedy="give each line its own id, or none an id",
                )

    def field(self, place: int, name: str) -> object:
        """Value of a field that is the reward's; None where a problem has none."""
        value = None if name in OWN_FIELDS else raw_fields(self._written_at(place)).get(name)
        return None if value is None else msgspec.json.decode(value)

    def lengths(self) -> IntArray:
        """[n] numbers of tokens of prompts, counted anew."""
        counted = []
        for begin in range(0, len(self), BATCH):
            rows = [self._at(place) for place in range(begin, min(begin + BATCH, len(self)))]
            prompts = [asked(line, written) for _, line, written in rows]
            counted += self.encoder.count(prompts, [self.encoder.write(prompt) for prompt in prompts])
        return np.array(counted, dtype=np.int32)

    @property
    def num_duplicates(self) -> int:
        """Number of problems whose prompt stands before."""
        return len(self._by_key.repeats())

    @property
    def digest(self) -> str:
        """Digest of all rows and of where they stand."""
        return self._digest.hexdigest()

    def error(self, place: int, problem: str, *, remedy: str) -> ConfigError:
        """A fault of a problem; its row is quoted."""
        row, _, written = self._at(place)
        return self.source.error(row, problem, value=written, remedy=remedy)

    @cached_property
    def _by_name(self) -> HashIndex:
        return HashIndex(self._names)

    @cached_property
    def _by_key(self) -> HashIndex:
        return HashIndex(self._keys)

    def _at(self, place: int) -> tuple[int, ProblemRow, bytes]:
        written = self._written_at(place)
        return self._rows[place], _problem_rows.decode(written), written

    def _written_at(self, place: int) -> bytes:
        return bytes(self._written[self._ends[place] : self._ends[place + 1]])

    def _task(self, line: ProblemRow) -> str:
        task = self.source.settings.task
        return (line.task or "") if task is None else task


_problem_rows = msgspec.json.Decoder(ProblemRow)


def asked(line: ProblemRow, written: bytes) -> str | list[Turn]:
    """The prompt of a row that has one. Raises `TemplateError`."""
    if isinstance(line.prompt, str):
        return line.prompt
    return read_turns(written_field(written, "messages" if line.prompt is None else "prompt"))


def folded(text: str) -> str:
    """A text in which differences of white space and of composed characters are gone; 3² stays apart from 32."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def text_key(text: str) -> int:
    """Hash that texts share which are the same when `folded`."""
    return hash(folded(text))


def _name(row: int, line: ProblemRow, written: bytes) -> str:
    return _text(written, "id", line.id) or f"p{row}"


def _text(written: bytes, name: str, value: str | float | None) -> str:
    """Text of a field that may be a number, which stays as the row has it."""
    if value is None:
        return ""
    return value if isinstance(value, str) else written_field(written, name)


def _fields(line: ProblemRow, written: bytes) -> bytes:
    """Fields for the reward; a prompt of messages is among them."""
    others = other_fields(written, OWN_FIELDS)
    if not isinstance(line.prompt, list):
        return others
    messages = b'{"messages":' + written_field(written, "prompt").encode()
    return messages + (b"}" if others == b"{}" else b"," + others[1:])


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
        most = encoder.tokenizer.max_ids(text)
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
