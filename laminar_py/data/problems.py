"""Problems of a source: reading and checking them, and holding a million of them in little memory.

Rows stay as JSON; a prompt is made when it is asked for. A place always gives the same problem. `preflight` and
`laminar data` read problems, `stream` draws from them.
"""

import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import islice

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.config.section import ConfigError
from laminar_py.data.chat import REMEDY, Message, PromptEncoder, TemplateError, Turn, read_turns
from laminar_py.data.sources import DataSource, count_rows, other_fields, raw_fields, read_records, written_field
from laminar_py.records.codec import IntArray
from laminar_py.records.trajectory import Prompt

BATCH = 1000  # prompts that are tokenized at a time
MOST_KNOWN = 1 << 16  # prompts that are remembered, since a set may repeat a prompt many times
OWN_FIELDS = ("prompt", "answer", "id", "task")  # the reward gets all other fields as they are
NO_IDS = np.array([], dtype=np.int32)


class HashIndex:
    """Finds places by hash, e.g. 0 and 2 for 7 in `[7, 3, 7]`. Hashes may collide, so callers compare values."""

    def __init__(self, hashes: Sequence[int]) -> None:
        unsorted = np.array(hashes, dtype=np.int64)
        self._order = np.argsort(unsorted, kind="stable").astype(np.int32)  # [n] places
        self._hashes = unsorted[self._order]  # [n] sorted

    def places(self, hash: int) -> IntArray:
        """Return the [m] places with this hash, ascending."""
        begin, end = (self._hashes.searchsorted(hash, side=side) for side in ("left", "right"))
        return self._order[begin:end]

    def repeats(self) -> IntArray:
        """Return pairs [r, 2] of places with equal hashes: a place, and the nearest earlier place with its hash.

        The pairs are in order of the first column. E.g. hashes `[7, 3, 7, 7]` give `[[2, 0], [3, 2]]`.
        """
        again = self._hashes[1:] == self._hashes[:-1]
        pairs = np.stack([self._order[1:][again], self._order[:-1][again]], axis=1)
        ordered: IntArray = pairs[np.argsort(pairs[:, 0])]
        return ordered


class ProblemRow(msgspec.Struct, frozen=True, kw_only=True):
    """Checked fields of a row, e.g. `{"prompt": "2+2=", "answer": "4"}`; `prompt` or `messages` is set."""

    prompt: str | list[Message] | None = None
    messages: list[Message] | None = None
    answer: str | int | float | None = None
    id: str | int | None = None
    task: str | None = None


Row = tuple[int, ProblemRow, bytes]  # number, checked fields, JSON
GivenPrompt = str | bytes  # as a row has it: text, or JSON of messages


class ProblemSet:
    """Problems of one source by place 0, 1, 2, ..., e.g. 1,000,000 in 0.4 GB; ids begin with `prefix`."""

    def __init__(self, source: DataSource, *, encoder: PromptEncoder, prefix: str = "") -> None:
        self.source = source
        self.tasks: dict[str, int] = {}  # task -> place of its first problem
        self.encoder = encoder
        self._prefix = prefix
        self._written = bytearray()  # JSON of all rows, end to end
        self._ends = array("q", [0])  # [n + 1] ends of rows in `_written`
        self._rows = array("q")  # [n] numbers of rows in the source, which counts blank lines
        self._keys = array("q")  # [n] `text_key` of prompts
        self._id_hashes = array("q")  # [n] hashes of ids without the prefix
        self._digest = blake2b(digest_size=16)

    def add(self, row: int, line: ProblemRow, written: bytes, *, key: int) -> None:
        """Append a row: its number, checked fields, JSON `written`, and the `text_key` of its prompt as `key`."""
        self.tasks.setdefault(self._task(line), len(self))
        self._id_hashes.append(hash(_row_id(row, line, written)))
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
        """Return the problem at a place, with its prompt encoded and the number of its row as `index`."""
        _, line, written = self._at(place)
        text, ids = self.encoder.encode(prompt_of(line, written))
        return msgspec.structs.replace(self.without_prompt(place), text=text, ids=ids)

    def without_prompt(self, place: int) -> Prompt:
        """Return the problem at a place; its prompt is left empty, since encoding takes the most time."""
        row, line, written = self._at(place)
        return Prompt(
            id=self._prefix + _row_id(row, line, written),
            index=row,
            text="",
            ids=NO_IDS,
            answer=text_of(written, "answer", line.answer),
            task=self._task(line),
            fields_json=_reward_fields(line, written),
        )

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """[n] bytes of each problem's row."""
        return np.diff(np.asarray(self._ends))

    def row(self, place: int) -> int:
        """Return the number of a problem's row in its source."""
        return self._rows[place]

    def id(self, place: int) -> str:
        """Return the id of a problem, with the prefix."""
        return self._prefix + _row_id(*self._at(place))

    def text(self, place: int) -> str:
        """Return the prompt of a problem as the model reads it."""
        _, line, written = self._at(place)
        return self.encoder.write(prompt_of(line, written))

    def find(self, id: str) -> int | None:
        """Return the place of the problem with this id, prefix included; None without one."""
        if not id.startswith(self._prefix):
            return None
        candidates = self._by_id.places(hash(id[len(self._prefix) :])).tolist()
        return next((place for place in candidates if self.id(place) == id), None)

    def find_prompt(self, text: str) -> int | None:
        """Return the place of the first problem whose prompt equals `text`, both `folded`; None without one."""
        candidates = self._by_key.places(text_key(text)).tolist()
        return next((place for place in candidates if folded(self.text(place)) == folded(text)), None)

    def check_ids(self) -> None:
        """Raise `ConfigError` if two problems have the same id."""
        for place, first in self._by_id.repeats().tolist():
            if (id := self.id(place)) == self.id(first):
                raise self.source.error(
                    self.row(place),
                    f"id also in line {self.row(first) + 1}",
                    value=id.removeprefix(self._prefix),
                    remedy="give each line its own id, or none an id",
                )

    def field(self, place: int, name: str) -> object:
        """Return a field that the reward gets besides `OWN_FIELDS`; None if the problem lacks it."""
        value = None if name in OWN_FIELDS else raw_fields(self._written_at(place)).get(name)
        return None if value is None else msgspec.json.decode(value)

    def lengths(self) -> IntArray:
        """Count the tokens of each prompt, [n]; each call tokenizes all prompts."""
        counted = []
        for begin in range(0, len(self), BATCH):
            rows = [self._at(place) for place in range(begin, min(begin + BATCH, len(self)))]
            prompts = [prompt_of(line, written) for _, line, written in rows]
            counted += self.encoder.count(prompts, [self.encoder.write(prompt) for prompt in prompts])
        return np.array(counted, dtype=np.int32)

    @property
    def num_duplicates(self) -> int:
        """Number of problems whose prompt an earlier problem has too."""
        return len(self._by_key.repeats())

    @property
    def digest(self) -> str:
        """Digest of all rows and their numbers."""
        return self._digest.hexdigest()

    def error(self, place: int, problem: str, *, remedy: str) -> ConfigError:
        """Return the error for a fault of a problem; it names and quotes the row."""
        row, _, written = self._at(place)
        return self.source.error(row, problem, value=written, remedy=remedy)

    @cached_property
    def _by_id(self) -> HashIndex:
        return HashIndex(self._id_hashes)

    @cached_property
    def _by_key(self) -> HashIndex:
        return HashIndex(self._keys)

    def _at(self, place: int) -> Row:
        written = self._written_at(place)
        return self._rows[place], _problem_rows.decode(written), written

    def _written_at(self, place: int) -> bytes:
        return bytes(self._written[self._ends[place] : self._ends[place + 1]])

    def _task(self, line: ProblemRow) -> str:
        task = self.source.settings.task
        return (line.task or "") if task is None else task


_problem_rows = msgspec.json.Decoder(ProblemRow)


def prompt_of(line: ProblemRow, written: bytes) -> str | list[Turn]:
    """Return the prompt of a row, whose JSON is `written`: text, or turns. Raises `TemplateError`."""
    if isinstance(line.prompt, str):
        return line.prompt
    return read_turns(written_field(written, "messages" if line.prompt is None else "prompt"))


def folded(text: str) -> str:
    """Return a text with single spaces and composed characters (NFC); 3² and 32 stay different."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def text_key(text: str) -> int:
    """Return the hash of the `folded` text."""
    return hash(folded(text))


def _row_id(row: int, line: ProblemRow, written: bytes) -> str:
    """Return the id that a row has in its JSON `written`, or "p" and its number."""
    return text_of(written, "id", line.id) or f"p{row}"


def text_of(written: bytes, name: str, value: str | float | None) -> str:
    """Return a field as text, "" for None; a number is copied from the row's JSON `written`, e.g. `1.50`."""
    if value is None:
        return ""
    return value if isinstance(value, str) else written_field(written, name)


def _reward_fields(line: ProblemRow, written: bytes) -> bytes:
    """Return the JSON of the fields that the reward gets; `prompt`, if it has messages, becomes `messages`."""
    others = other_fields(written, OWN_FIELDS)
    if not isinstance(line.prompt, list):
        return others
    messages = b'{"messages":' + written_field(written, "prompt").encode()
    return messages + (b"}" if others == b"{}" else b"," + others[1:])


def read_prompts(
    source: DataSource, *, encoder: PromptEncoder, max_prompt_tokens: int | None, prefix: str = ""
) -> ProblemSet:
    """Read and check all problems of a source. Raises `ConfigError` on the first invalid row.

    Ids begin with `prefix`. `max_prompt_tokens` bounds a prompt; None: any length.
    """
    problems = ProblemSet(source, encoder=encoder, prefix=prefix)
    keys: dict[GivenPrompt, int] = {}
    rows = read_records(source, ProblemRow)
    while batch := list(islice(rows, BATCH)):
        prompts = [_given_prompt(source, *row) for row in batch]
        new = {prompt: row for prompt, row in zip(prompts, batch, strict=True) if prompt not in keys}
        keys.update(zip(new, _check_prompts(source, new, encoder=encoder, limit=max_prompt_tokens), strict=True))
        for prompt, row in zip(prompts, batch, strict=True):
            problems.add(*row, key=keys[prompt])
        if len(keys) > MOST_KNOWN:
            keys.clear()
    problems.check_ids()
    return problems


def _given_prompt(source: DataSource, row: int, line: ProblemRow, written: bytes) -> GivenPrompt:
    """Return a row's prompt: its text, or the JSON of its messages. Raises `ConfigError` without a prompt."""
    if isinstance(line.prompt, str):
        return line.prompt
    if line.prompt is None and line.messages is None:
        remedy = f"write one, or name the column that has it in {source.field}.columns"
        raise source.error(row, "missing required field `prompt`", value=written, remedy=remedy)
    return written_field(written, "messages" if line.prompt is None else "prompt").encode()


def _check_prompts(
    source: DataSource, rows: "dict[GivenPrompt, Row]", *, encoder: PromptEncoder, limit: int | None
) -> list[int]:
    """Return the `text_key` of each prompt. Raises `ConfigError` for an empty one or above `limit` tokens.

    Tokenizing takes most of the time, so a prompt is not tokenized if its number of bytes proves it valid.
    """
    keys: list[int] = []
    to_count: list[tuple[GivenPrompt, int, str | list[Turn], str]] = []
    for given, (row, line, written) in rows.items():
        try:
            text = encoder.write(prompt := prompt_of(line, written))
        except TemplateError as error:
            raise source.error(row, str(error), value=written, remedy=REMEDY) from None
        most = encoder.tokenizer.max_ids(text)
        if not text or most is None or (limit is not None and most > limit):
            to_count.append((given, row, prompt, text))
        keys.append(text_key(text))
    lengths = encoder.count([prompt for _, _, prompt, _ in to_count], [text for *_, text in to_count])
    for (given, row, _, _), num_tokens in zip(to_count, lengths, strict=True):
        if not num_tokens:
            raise source.error(row, "prompt is empty", value=given, remedy="write a prompt or remove the line")
        if limit is not None and num_tokens > limit:
            raise source.error(
                row,
                f"prompt has {num_tokens} tokens, above the {limit} that a response leaves of rollout.max_len,",
                value=given,
                remedy="raise rollout.max_len or shorten the prompt",
            )
    return keys


def missing_rows(sets: Iterable[ProblemSet]) -> str:
    """Return how a set differs from the file that it was read from, "" if it has all rows."""
    for problems in sets:
        rows = count_rows(problems.source.settings)
        if rows is not None and rows != len(problems):
            return (
                f"{problems.source.field}={problems.source.path}: {len(problems):,} of {rows:,} rows were read;"
                " look for what leaves rows out"
            )
    return ""


def check_disjoint(heldout: ProblemSet, train: Sequence[ProblemSet]) -> None:
    """Raise `ConfigError` if a held-out prompt is also a training prompt."""
    leaks = find_leaks(heldout, train)
    if leaks:
        place, there = leaks[0]
        more = f" ({len(leaks)} problems in all; `laminar data` counts them)" if len(leaks) > 1 else ""
        raise heldout.source.error(
            heldout.row(place),
            f"prompt also in {there}{more}",
            value=heldout.text(place),
            remedy="remove the prompt from one of the two",
        )


def find_leaks(heldout: ProblemSet, train: Sequence[ProblemSet]) -> list[tuple[int, str]]:
    """Return (place, file and line of the training prompt) of each held-out problem that `train` has too."""
    leaks = []
    for place in range(len(heldout)):
        text = heldout.text(place)
        matches = ((problems, problems.find_prompt(text)) for problems in train)
        train_place = next(
            (problems.source.place(problems.row(at)) for problems, at in matches if at is not None), None
        )
        if train_place is not None:
            leaks.append((place, train_place))
    return leaks


def first_of_tasks(sets: Iterable[ProblemSet]) -> list[Prompt]:
    """Return the first problem of each task over all sets."""
    first: dict[str, Prompt] = {}
    for problems in sets:
        for task, place in problems.tasks.items():
            if task not in first:
                first[task] = problems[place]
    return list(first.values())
