"""Token ids of a response as texts, one for each. Called by `reading`.

Invariant: the texts of a response's tokens, joined, are its text as the tokenizer decodes it, special tokens
included, whatever kind of tokenizer that is. Exact to the token for byte-level vocabularies, words and
SentencePiece; where another decoder rewrites what it joins, the bounds between tokens are as near as lengths tell.
"""

import codecs
import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, groupby, islice, pairwise
from pathlib import Path

import msgspec
import numpy as np
import yaml

from laminar_py.config.section import ConfigError
from laminar_py.data.tokenizer import Tokenizer, load_tokenizer
from laminar_py.ledger.audit.queries import Filters, condition
from laminar_py.ledger.audit.stories import Story, read_story
from laminar_py.ledger.database import ledger_path, reading
from laminar_py.ledger.responses import StoredResponses
from laminar_py.observe.samples import FullSample, PromptVisit, SampleOrder, SampleRow, TokenSpan
from laminar_py.records.codec import IntArray
from laminar_py.records.columns import Array
from laminar_py.records.events import Scored
from laminar_py.records.scoring import TermValue
from laminar_py.records.trajectory import Kind

_BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}  # of SentencePiece


def token_texts(tokenizer: Tokenizer, ids: IntArray) -> list[str]:
    """[L] texts of the tokens `ids`; the bytes of a character stand with the token that completes it.

    Bytes that are no character are the replacement character. E.g. the three tokens of "é!" whose first two are
    its bytes have the texts `["", "é", "!"]`.
    """
    whole = tokenizer.decode(ids, special=True)
    texts = _read_bytes(_bytes_of(tokenizer.word(id)) for id in ids.tolist())
    if "".join(texts) == whole:
        return texts
    ends = list(accumulate(map(len, _decode_apart(tokenizer, ids.tolist()))))
    return [whole[start:end] for start, end in pairwise((0, *ends[:-1], len(whole)))]


def _read_bytes(tokens: Iterable[bytes]) -> list[str]:
    """Text that each token completes of UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(token) for token in tokens]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


def _bytes_of(word: str) -> bytes:
    """Bytes of a token of a byte-level vocabulary, in which each byte is written as a character of its own."""
    try:
        return bytes(_byte_characters()[character] for character in word)
    except KeyError:  # an added token, which stands for itself
        return word.encode()


@cache
def _byte_characters() -> dict[str, int]:
    """Bytes by their characters (GPT-2): what prints stands for itself, the others follow from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _decode_apart(tokenizer: Tokenizer, ids: list[int]) -> Iterator[str]:
    """Text of each token, decoded behind the one before it; byte tokens in a row are decoded together."""

    @cache
    def text(*tokens: int) -> str:
        return tokenizer.decode(np.array(tokens, np.int32), special=True)

    before: tuple[int, ...] = ()
    for is_bytes, found in groupby(ids, key=lambda id: tokenizer.word(id) in _BYTE_TOKENS):
        row = list(found)
        for unit in [tuple(row)] if is_bytes else [(id,) for id in row]:
            added = text(*before, *unit)[len(text(*before)) :]
            yield from _share(tokenizer, unit, added) if is_bytes else [added]
            before = unit


def _share(tokenizer: Tokenizer, unit: tuple[int, ...], text: str) -> list[str]:
    """Parts of the text of byte tokens in a row, all of which are replacement characters where one is broken."""
    texts = _read_bytes(bytes([_BYTE_TOKENS[tokenizer.word(id)]]) for id in unit)
    return (
        texts
        if "".join(texts) == text
        else list(text)
        if len(text) == len(unit)
        else [""] * (len(unit) - 1) + [text]
    )


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


_NEAR = 4096  # of the newest trajectories with a score, among which groups are compared
_TRAINED = ("step", "staleness", "advantage")  # what evaluations have as 0 or -1, which says nothing
_COLUMNS = ", ".join(
    f"iif(kind = '{Kind.TRAIN}', {name}, NULL)" if name in _TRAINED else name
    for name in SampleRow.__struct_fields__
)
_SORTED = {  # what has the number that an order goes by, and how it is sorted
    SampleOrder.NEWEST: ("1", "number DESC"),
    SampleOrder.OLDEST: ("1", "number"),
    SampleOrder.BEST: ("reward IS NOT NULL", "reward DESC, number DESC"),
    SampleOrder.WORST: ("reward IS NOT NULL", "reward, number DESC"),
    SampleOrder.LONGEST: ("1", "length DESC, number DESC"),
    SampleOrder.SHORTEST: ("finish_reason IS NOT NULL", "length, number DESC"),
    SampleOrder.STALEST: (f"staleness IS NOT NULL AND kind = '{Kind.TRAIN}'", "staleness DESC, number DESC"),
}


def list_samples(
    run: Path, filters: Filters, *, order: SampleOrder = SampleOrder.NEWEST, limit: int = 100
) -> list[SampleRow]:
    """Trajectories that pass all filters, at most `limit`. Raises `ConfigError` on a bad comparison."""
    where, values = condition(filters)
    with reading(run) as connection:
        if order is SampleOrder.CONTRAST:
            return _contrasts(connection, where, values, limit=limit)
        known, by = _SORTED[order]
        # numbers alone are sorted: rows that are soon displaced by others are not worth reading
        first = f"SELECT number FROM trajectory WHERE {where} AND {known} ORDER BY {by} LIMIT ?"
        return list(_rows(connection, f"WHERE number IN ({first}) ORDER BY {by}", (*values, limit)))


def read_sample(run: Path, trajectory_id: str, *, model: Path | None = None) -> FullSample:
    """A trajectory with its text, by the tokenizer of the run's model or of the folder `model`.

    Raises `ConfigError` if it does not exist, or if that folder has no tokenizer.
    """
    return read_samples(run, [trajectory_id], model=model)[0]


def read_samples(run: Path, trajectory_ids: Sequence[str], *, model: Path | None = None) -> list[FullSample]:
    """Several trajectories, likewise, in this order, with one look for all their prompts."""
    return [sample for _, sample in _read(run, trajectory_ids, model)]


def read_life(run: Path, trajectory_id: str, *, model: Path | None = None) -> tuple[Story, FullSample]:
    """A trajectory's events and, likewise, its text, by one reading."""
    return _read(run, [trajectory_id], model)[0]


def _read(run: Path, trajectory_ids: Sequence[str], model: Path | None) -> list[tuple[Story, FullSample]]:
    found = find_model(ledger_path(run).parent, model)
    with reading(run) as connection:
        responses = StoredResponses(run, connection)
        stories = [read_story(connection, responses, trajectory_id) for trajectory_id in trajectory_ids]
        prompts = list({told.row.prompt_id for told in stories})
        by_prompt: dict[str, list[SampleRow]] = {prompt: [] for prompt in prompts}
        asked = f"WHERE prompt_id IN ({', '.join('?' * len(prompts))}) ORDER BY number"
        for row in _rows(connection, asked, tuple(prompts)):
            by_prompt[row.prompt_id].append(row)
        return [(told, _full(responses, told, by_prompt[told.row.prompt_id], found)) for told in stories]


def _full(responses: StoredResponses, told: Story, of_prompt: Sequence[SampleRow], model: RunModel) -> FullSample:
    """A sample, given every trajectory of its prompt."""
    ids = told.response.ids
    return FullSample(
        row=next(row for row in of_prompt if row.number == told.row.number),
        prompt=told.prompt,
        answer=told.answer,
        task=told.task,
        tokens=[f"{id} " for id in ids.tolist()] if model.tokenizer is None else token_texts(model.tokenizer, ids),
        ids_only=model.why,
        ids=ids.tolist(),
        logprobs=_finite(told.response.logprobs),
        spans=_spans(told),
        terms=_terms(told),
        columns=_columns(responses, told),
        siblings=[row for row in of_prompt if row.group_id == told.row.group_id],
        history=_visits(of_prompt, solved_at=model.solved_at),
        lost=told.lost,
    )


def _rows(connection: sqlite3.Connection, tail: str, values: tuple[object, ...]) -> Iterator[SampleRow]:
    cursor = connection.execute(f"SELECT {_COLUMNS} FROM trajectory {tail}", values)
    names = SampleRow.__struct_fields__
    return (msgspec.convert(dict(zip(names, row, strict=True)), SampleRow) for row in cursor)


def _contrasts(
    connection: sqlite3.Connection, where: str, values: tuple[object, ...], *, limit: int
) -> list[SampleRow]:
    """Best and worst of the newest groups; members of a group are issued near each other."""
    tail = f"WHERE {where} AND reward IS NOT NULL ORDER BY number DESC LIMIT ?"
    groups: dict[tuple[str, str], list[SampleRow]] = {}
    for row in _rows(connection, tail, (*values, _NEAR)):
        groups.setdefault((row.group_id, row.prompt_id), []).append(row)
    return list(islice((row for members in groups.values() for row in _extremes(members)), limit))


def _extremes(members: Sequence[SampleRow]) -> list[SampleRow]:
    """The best, and the worst if its reward is another; of equal ones the first issued."""
    ordered = sorted(members, key=lambda row: (-(row.reward or 0.0), row.number))
    best, worst = ordered[0], ordered[-1]
    return [best, worst] if best.reward != worst.reward else [best]


def _spans(told: Story) -> list[TokenSpan]:
    return [
        TokenSpan(
            version=stretch.span.version,
            replica=stretch.replica,
            start=stretch.span.start,
            end=stretch.span.end,
            kv_version=stretch.span.kv_version,
        )
        for stretch in told.stretches
    ]


def _terms(told: Story) -> list[TermValue]:
    """Terms of its last score: what was undone may be scored anew."""
    scores = [entry.event for entry in told.events if isinstance(entry.event, Scored)]
    return scores[-1].terms if scores else []


def _columns(responses: StoredResponses, told: Story) -> dict[str, list[float | None]]:
    """Columns of a response, which say nothing where that is lost."""
    found = {} if told.lost else responses.columns(told.row)
    return {name: _finite(values.array) for name, values in found.items()}


def _finite(values: Array) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _visits(of_prompt: Iterable[SampleRow], *, solved_at: float) -> list[PromptVisit]:
    groups: dict[str, list[SampleRow]] = {}
    for row in of_prompt:
        groups.setdefault(row.group_id, []).append(row)
    return [_visit(members, solved_at) for members in groups.values()]


def _visit(members: Sequence[SampleRow], solved_at: float) -> PromptVisit:
    first = members[0]
    rewards = [row.reward for row in members if row.reward is not None]
    return PromptVisit(
        group_id=first.group_id,
        kind=first.kind,
        number=first.number,
        step=max((row.step for row in members if row.step is not None), default=None),
        version=min((row.oldest_version for row in members if row.oldest_version is not None), default=None),
        samples=len(members),
        scored=len(rewards),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        solved=sum(reward >= solved_at for reward in rewards) / len(rewards) if rewards else None,
        mean_length=sum(row.length for row in members) / len(members),
    )
