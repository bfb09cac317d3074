"""Texts that the model wrote: rows of a list, and one response with everything beside it, from the ledger.

`laminar samples`, `laminar audit RUN show`, the report and the dashboard read samples here. A record holds a text
as the model wrote it; a view escapes it before showing it (`records.host.visible`, or text nodes of the page).
"""

import codecs
import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache
from itertools import accumulate, groupby, islice, pairwise
from pathlib import Path

import msgspec
import numpy as np
import yaml

from laminar_lab.audit.queries import Filters, condition
from laminar_lab.audit.stories import ReplicaSpan, Story, read_story_from
from laminar_py.config.section import ConfigError
from laminar_py.data import Tokenizer, load_tokenizer
from laminar_py.ledger import StoredResponses, ledger_path, reading
from laminar_py.records.codec import IntArray
from laminar_py.records.columns import Array
from laminar_py.records.evaluations import set_of
from laminar_py.records.events import Scored
from laminar_py.records.scoring import TermValue
from laminar_py.records.trajectory import DropReason, FinishReason, Kind, Status


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory in a list, e.g. sample "g3.1" of prompt "p17" with 41 tokens, which step 12 trained on.

    A field is None while its value is unknown.
    """

    number: int  # 1, 2, 3, ... in the order of issue
    id: str
    prompt_id: str
    group_id: str  # of an evaluation: its pass
    kind: Kind
    status: Status
    step: int | None  # the learner step that trained on it; None for evaluations
    staleness: int | None  # learner steps
    oldest_version: int | None
    newest_version: int | None
    reward: float | None
    advantage: float | None
    length: int  # response tokens on record
    finish_reason: FinishReason | None
    cap: str | None  # the cap that cut it: `tokens` or `seconds`
    drop_reason: DropReason | None
    drop_detail: str | None

    @property
    def set_name(self) -> str:
        """Name of the evaluation set, "" for training."""
        return set_of(self.group_id) if self.kind is Kind.EVAL else ""


class PromptVisit(msgspec.Struct, frozen=True, kw_only=True):
    """A visit of a prompt: its samples in one group, or in one pass of an evaluation.

    E.g. `PromptVisit(group_id="g40", number=321, samples=8, scored=8, mean_reward=0.25, solved=0.25, ...)`.
    """

    group_id: str
    kind: Kind
    number: int  # of its first trajectory, so that visits can be sorted
    step: int | None  # the last learner step that trained on one of the samples
    version: int | None  # the oldest weight version of the samples
    samples: int
    scored: int
    mean_reward: float | None  # over scored samples; None without any
    solved: float | None  # share of scored samples with a reward of at least `data.solved_at`
    mean_length: float  # response tokens


class FullSample(msgspec.Struct, frozen=True, kw_only=True):
    """A response as text, with its problem, its reward, its group and the other visits of its prompt.

    E.g. the response to "2+2=" has the tokens `["4", "<eos>"]` with ids `[6, 1]`. L is the number of response
    tokens.
    """

    row: SampleRow
    prompt: str  # as the model received it
    answer: str
    task: str
    tokens: list[str]  # [L] texts; their join is the response; a character stands with the token that completes it
    ids_only: str  # why `tokens` are ids instead of text, in one line; "" for text
    ids: list[int]  # [L]
    logprobs: list[float | None]  # [L] from the sampling policy; None for a value that is not finite
    spans: list[ReplicaSpan]  # cover [0, L)
    terms: list[TermValue]  # of the reward, with each verifier's words
    columns: dict[str, list[float | None]]  # recorded numbers per token by name, each [L]
    siblings: list[SampleRow]  # samples of its prompt in its group, with itself, in the order of issue
    history: list[PromptVisit]  # visits of its prompt, with its own, in the order of issue
    lost: str = ""  # why its tokens cannot be read, in one line; L is 0 then

    @property
    def text(self) -> str:
        """The response with its special tokens."""
        return "".join(self.tokens)


class SampleOrder(StrEnum):
    """Orders of a list. A list leaves out trajectories without the number that its order needs."""

    CONTRAST = "contrast"  # of each of the newest scored groups the best, and the worst if its reward differs
    NEWEST = "newest"
    OLDEST = "oldest"
    BEST = "best"
    WORST = "worst"
    LONGEST = "longest"
    SHORTEST = "shortest"
    STALEST = "stalest"


# ---- lists

_NEAR = 4096  # newest scored trajectories, among which `CONTRAST` compares groups
_TRAINED = ("step", "staleness", "advantage")  # an evaluation stores 0 or -1 there, which means nothing
_COLUMNS = ", ".join(
    f"iif(kind = '{Kind.TRAIN}', {name}, NULL)" if name in _TRAINED else name
    for name in SampleRow.__struct_fields__
)
_SORTED = {  # SQL: trajectories that have the number of an order, and how to sort them
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
    """Read at most `limit` trajectories that pass all filters. Raises `ConfigError` on a bad comparison."""
    where, values = condition(filters)
    with reading(run) as connection:
        if order is SampleOrder.CONTRAST:
            return _read_contrasts(connection, where, values, limit=limit)
        has_number, by = _SORTED[order]
        # sort numbers alone, since most rows would be read in vain
        first = f"SELECT number FROM trajectory WHERE {where} AND {has_number} ORDER BY {by} LIMIT ?"
        return list(_read_rows(connection, f"WHERE number IN ({first}) ORDER BY {by}", (*values, limit)))


def best_and_worst(rows: Sequence[SampleRow]) -> list[SampleRow]:
    """Return the scored row with the best reward, and the one with the worst if it differs; else the first row.

    Of equal rewards the row that was issued first counts.
    """
    scored = [row for row in rows if row.reward is not None]
    ordered = sorted(scored, key=lambda row: (-(row.reward or 0.0), row.number))
    if not ordered:
        return list(rows[:1])
    best, worst = ordered[0], ordered[-1]
    return [best, worst] if best.reward != worst.reward else [best]


def _read_rows(connection: sqlite3.Connection, tail: str, values: tuple[object, ...]) -> Iterator[SampleRow]:
    """Read rows with the SQL `tail` of a query on trajectories, and the values of its parameters."""
    cursor = connection.execute(f"SELECT {_COLUMNS} FROM trajectory {tail}", values)
    names = SampleRow.__struct_fields__
    return (msgspec.convert(dict(zip(names, row, strict=True)), SampleRow) for row in cursor)


def _read_contrasts(
    connection: sqlite3.Connection, where: str, values: tuple[object, ...], *, limit: int
) -> list[SampleRow]:
    """Read the best and the worst of the newest groups; members of a group are issued near each other."""
    tail = f"WHERE {where} AND reward IS NOT NULL ORDER BY number DESC LIMIT ?"
    groups: dict[tuple[str, str], list[SampleRow]] = {}
    for row in _read_rows(connection, tail, (*values, _NEAR)):
        groups.setdefault((row.group_id, row.prompt_id), []).append(row)
    return list(islice((row for members in groups.values() for row in best_and_worst(members)), limit))


# ---- one sample with its text


def read_sample(run: Path, trajectory_id: str, *, model: Path | None = None) -> FullSample:
    """Read a trajectory with its text, by the tokenizer of the run's model or of the folder `model`.

    Raises `ConfigError` for an unknown trajectory, or if that folder has no tokenizer.
    """
    return read_samples(run, [trajectory_id], model=model)[0]


def read_samples(run: Path, trajectory_ids: Sequence[str], *, model: Path | None = None) -> list[FullSample]:
    """Read several trajectories in this order, as `read_sample` does, with one query for all prompts."""
    return [sample for _, sample in read_stories(run, trajectory_ids, model=model)]


def read_stories(
    run: Path, trajectory_ids: Sequence[str], *, model: Path | None = None
) -> list[tuple[Story, FullSample]]:
    """Read trajectories as `read_samples` does, each with its events."""
    found = find_model(ledger_path(run).parent, model)
    with reading(run) as connection:
        responses = StoredResponses(run, connection)
        stories = [read_story_from(connection, responses, trajectory_id) for trajectory_id in trajectory_ids]
        prompts = list({story.row.prompt_id for story in stories})
        by_prompt: dict[str, list[SampleRow]] = {prompt: [] for prompt in prompts}
        tail = f"WHERE prompt_id IN ({', '.join('?' * len(prompts))}) ORDER BY number"
        for row in _read_rows(connection, tail, tuple(prompts)):
            by_prompt[row.prompt_id].append(row)
        return [
            (story, _make_sample(responses, story, by_prompt[story.row.prompt_id], found)) for story in stories
        ]


def _make_sample(
    responses: StoredResponses, story: Story, same_prompt: Sequence[SampleRow], model: "RunModel"
) -> FullSample:
    """Make a sample from its story and the rows of all trajectories with its prompt."""
    ids = story.response.ids
    columns = {} if story.lost else responses.columns(story.row)
    scores = [entry.event for entry in story.events if isinstance(entry.event, Scored)]
    return FullSample(
        row=next(row for row in same_prompt if row.number == story.row.number),
        prompt=story.prompt,
        answer=story.answer,
        task=story.task,
        tokens=[f"{id} " for id in ids.tolist()] if model.tokenizer is None else token_texts(model.tokenizer, ids),
        ids_only=model.why,
        ids=ids.tolist(),
        logprobs=_finite(story.response.logprobs),
        spans=story.spans,
        terms=scores[-1].terms if scores else [],  # of the last score: undone work may be scored again
        columns={name: _finite(values.array) for name, values in columns.items()},
        siblings=[row for row in same_prompt if row.group_id == story.row.group_id],
        history=_make_visits(same_prompt, solved_at=model.solved_at),
        lost=story.lost,
    )


def _finite(values: Array) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _make_visits(same_prompt: Iterable[SampleRow], *, solved_at: float) -> list[PromptVisit]:
    """Make a visit for each group of a prompt's samples, in the order of issue."""
    groups: dict[str, list[SampleRow]] = {}
    for row in same_prompt:
        groups.setdefault(row.group_id, []).append(row)
    return [_make_visit(members, solved_at) for members in groups.values()]


def _make_visit(members: Sequence[SampleRow], solved_at: float) -> PromptVisit:
    """Summarise one group's samples; a reward of at least `solved_at` counts as solved."""
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


# ---- the tokenizer of a run


class _ModelPart(msgspec.Struct, frozen=True):
    path: str


class _DataPart(msgspec.Struct, frozen=True):
    solved_at: float = 1.0


class _RunYaml(msgspec.Struct, frozen=True):
    """The settings that texts need, so that the config of another release can be read."""

    model: _ModelPart
    data: _DataPart = _DataPart()


class _EvalOrigin(msgspec.Struct, frozen=True):
    """Source of an evaluation: `runs/<name>-<n>/checkpoints/<step>`, or a model folder."""

    path: str


@dataclass(frozen=True, slots=True)
class RunModel:
    """Tokenizer of a run's model, or the reason why there is none; and the reward that solves a problem."""

    tokenizer: Tokenizer | None
    why: str  # one line; "" with a tokenizer
    solved_at: float


def find_model(run: Path, model: Path | None) -> RunModel:
    """Load the tokenizer of the folder `model` if it is given, else of the run's model.

    Raises `ConfigError` if `model` has no tokenizer. A run without its model can be read.
    """
    try:
        config = _read_config(run)
    except ConfigError as error:
        solved_at = _DataPart().solved_at
        return RunModel(None, str(error), solved_at) if model is None else RunModel(_load(model), "", solved_at)
    if model is not None:
        return RunModel(_load(model), "", config.data.solved_at)
    whys = []
    for folder in (Path(config.model.path), *_evaluated_models(run)):
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
        raise ConfigError(
            f"config={path}: does not name a model ({words}); name its folder with --model"
        ) from None


def _evaluated_models(run: Path) -> Iterator[Path]:
    """Model folder of the run whose checkpoint was evaluated, since the exported folder is deleted."""
    try:
        source = msgspec.json.decode((run / "source.json").read_bytes(), type=_EvalOrigin)
        yield Path(_read_config(Path(source.path).parents[1]).model.path)
    except (OSError, IndexError, msgspec.DecodeError, ConfigError):
        return


def _load(folder: Path) -> Tokenizer:
    """Load the tokenizer of a folder, which takes a second for a large vocabulary, so a few are cached."""
    try:
        changed = (folder / "tokenizer.json").stat().st_mtime_ns
    except OSError:
        changed = 0
    return _load_cached(folder.absolute(), changed) if changed else load_tokenizer(folder)


@lru_cache(maxsize=4)
def _load_cached(folder: Path, changed_ns: int) -> Tokenizer:
    """Load a tokenizer; `changed_ns` is the time of its file, so a new file is loaded again."""
    return load_tokenizer(folder)


# ---- texts of tokens

_BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}  # of SentencePiece


def token_texts(tokenizer: Tokenizer, ids: IntArray) -> list[str]:
    """Return a text [L] for each of the tokens `ids`; their join is the decoded response.

    A character of several tokens stands with its last token: the three tokens of "é!" have the texts `["", "é",
    "!"]`. Bytes without a character become the replacement character. The texts are exact for byte-level
    vocabularies, words and SentencePiece; for other decoders the bounds between tokens are estimated by lengths.
    """
    whole = tokenizer.decode(ids, special=True)
    texts = _decode_bytes(_bytes_of(tokenizer.word(id)) for id in ids.tolist())
    if "".join(texts) == whole:
        return texts
    ends = list(accumulate(map(len, _decode_each(tokenizer, ids.tolist()))))
    return [whole[start:end] for start, end in pairwise((0, *ends[:-1], len(whole)))]


def _decode_bytes(tokens: Iterable[bytes]) -> list[str]:
    """Return for each token the UTF-8 text that it completes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(token) for token in tokens]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


def _bytes_of(word: str) -> bytes:
    """Return a word's bytes in a byte-level vocabulary, which writes each byte as one character."""
    try:
        return bytes(_byte_characters()[character] for character in word)
    except KeyError:  # an added token, which stands for itself
        return word.encode()


@cache
def _byte_characters() -> dict[str, int]:
    """Bytes by their characters (GPT-2): a printing byte stands for itself, the others follow from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _decode_each(tokenizer: Tokenizer, ids: list[int]) -> Iterator[str]:
    """Decode each token after the token before it; consecutive byte tokens are decoded together."""

    @cache
    def decode(*tokens: int) -> str:
        return tokenizer.decode(np.array(tokens, np.int32), special=True)

    before: tuple[int, ...] = ()
    for is_bytes, found in groupby(ids, key=lambda id: tokenizer.word(id) in _BYTE_TOKENS):
        row = list(found)
        for unit in [tuple(row)] if is_bytes else [(id,) for id in row]:
            added = decode(*before, *unit)[len(decode(*before)) :]
            yield from _split_byte_text(tokenizer, unit, added) if is_bytes else [added]
            before = unit


def _split_byte_text(tokenizer: Tokenizer, unit: tuple[int, ...], text: str) -> list[str]:
    """Divide the text of consecutive byte tokens among them; one broken byte makes all replacement characters."""
    texts = _decode_bytes(bytes([_BYTE_TOKENS[tokenizer.word(id)]]) for id in unit)
    if "".join(texts) == text:
        return texts
    return list(text) if len(text) == len(unit) else [""] * (len(unit) - 1) + [text]
