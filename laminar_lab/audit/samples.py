"""Texts that the model wrote: lists of trajectories in an order, and trajectories with text, from the ledger.

`laminar samples`, `laminar audit RUN show` and the report read samples here. A sample holds a text as the model
wrote it; `sample_lines` escapes it.
"""

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from pathlib import Path

import msgspec
import yaml

from laminar_lab.audit.queries import Filters, condition, row_record
from laminar_lab.audit.stored import StoredResponses
from laminar_lab.audit.stories import Story, read_story
from laminar_py.config.section import ConfigError
from laminar_py.data import Tokenizer, load_tokenizer
from laminar_py.ledger import TrajectoryRow, ledger_path, reading, trajectory_rows
from laminar_py.records.codec import IntArray
from laminar_py.records.columns import Array
from laminar_py.records.trajectory import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A trajectory with its response as text and its group. L is the number of response tokens.

    E.g. the response to "2+2=" has the tokens `["4", "<eos>"]`.
    """

    story: Story
    tokens: list[str]  # [L] texts; their join is the response; a character stands with the token that completes it
    ids_only: str  # why `tokens` are ids instead of text, in one line; "" for text
    columns: dict[str, list[float | None]]  # recorded numbers per token by name, each [L]
    siblings: list[TrajectoryRow]  # of its group, with itself, in the order of issue

    @property
    def text(self) -> str:
        """The response with its special tokens."""
        return "".join(self.tokens)

    @property
    def logprobs(self) -> list[float | None]:
        """[L] from the sampling policy; None for a value that is not finite."""
        return _finite(self.story.response.logprobs)

    def record(self) -> dict[str, object]:
        """Return the sample as JSON values, with everything but its events."""
        story = self.story
        return {
            "row": row_record(story.row),
            "prompt": story.prompt,
            "answer": story.answer,
            "task": story.task,
            "tokens": self.tokens,
            "ids_only": self.ids_only,
            "ids": story.response.ids.tolist(),
            "logprobs": self.logprobs,
            "spans": msgspec.to_builtins(story.spans),
            "terms": msgspec.to_builtins(story.terms),
            "columns": self.columns,
            "siblings": [row_record(row) for row in self.siblings],
            "lost": story.lost,
        }


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
_SORTED = {  # SQL: trajectories that have the number of an order, and how to sort them
    SampleOrder.CONTRAST: ("reward IS NOT NULL", "number DESC"),
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
) -> list[TrajectoryRow]:
    """Read at most `limit` trajectories that pass all filters. Raises `ConfigError` on a bad comparison."""
    where, values = condition(filters)
    has_number, by = _SORTED[order]
    most = _NEAR if order is SampleOrder.CONTRAST else limit
    with reading(run) as connection:
        # sort numbers alone, since most rows would be read in vain
        query = f"SELECT number FROM trajectory WHERE {where} AND {has_number} ORDER BY {by} LIMIT ?"
        numbers = [number for (number,) in connection.execute(query, (*values, most))]
        rows = {row.number: row for row in _rows_among(connection, "number", numbers)}
    samples = [rows[number] for number in numbers]
    return _contrasts(samples, limit) if order is SampleOrder.CONTRAST else samples


def newest_contrasts(run: Path, *, limit: int) -> list[TrajectoryRow]:
    """Read the best and the worst of the newest groups of training, or else of evaluations."""
    train = list_samples(run, Filters(kind=Kind.TRAIN), order=SampleOrder.CONTRAST, limit=limit)
    return train or list_samples(run, Filters(), order=SampleOrder.CONTRAST, limit=limit)


def _rows_among(connection: sqlite3.Connection, column: str, values: Iterable[object]) -> Iterable[TrajectoryRow]:
    among = f"{column} IN (SELECT value FROM json_each(?))"
    return trajectory_rows(connection, among, (json.dumps(list(values)),))


def _contrasts(rows: Iterable[TrajectoryRow], limit: int) -> list[TrajectoryRow]:
    """Return the best and the worst of each group; members of a group are issued near each other."""
    groups: dict[tuple[str, str], list[TrajectoryRow]] = {}
    for row in rows:
        groups.setdefault((row.group_id, row.prompt_id), []).append(row)
    return list(islice((row for members in groups.values() for row in best_and_worst(members)), limit))


def best_and_worst(scored: Sequence[TrajectoryRow]) -> list[TrajectoryRow]:
    """Return the row with the best reward, and the one with the worst if it differs.

    Of equal rewards the row that was issued first counts.
    """
    ordered = sorted(scored, key=lambda row: (-(row.reward or 0.0), row.number))
    best, worst = ordered[0], ordered[-1]
    return [best, worst] if best.reward != worst.reward else [best]


# ---- samples with their texts


def read_sample(run: Path, trajectory_id: str, *, model: Path | None = None) -> Sample:
    """Read a trajectory with its text, by the tokenizer of the run's model or of the folder `model`.

    Raises `ConfigError` for an unknown trajectory, or if that folder has no tokenizer.
    """
    return read_samples(run, [trajectory_id], model=model)[0]


def read_samples(run: Path, trajectory_ids: Sequence[str], *, model: Path | None = None) -> list[Sample]:
    """Read several trajectories in this order, as `read_sample` does, with one query for all groups."""
    tokenizer, why = find_tokenizer(ledger_path(run).parent, model)
    with reading(run) as connection:
        responses = StoredResponses(run, connection)
        stories = [read_story(connection, responses, trajectory_id) for trajectory_id in trajectory_ids]
        same_group = list(_rows_among(connection, "group_id", {story.row.group_id for story in stories}))
        return [
            Sample(
                story=story,
                tokens=_token_texts(tokenizer, story.response.ids),
                ids_only=why,
                columns={} if story.lost else _finite_columns(responses, story.row),
                siblings=[
                    row
                    for row in same_group
                    if (row.group_id, row.prompt_id) == (story.row.group_id, story.row.prompt_id)
                ],
            )
            for story in stories
        ]


def _token_texts(tokenizer: Tokenizer | None, ids: IntArray) -> list[str]:
    return [f"{id} " for id in ids.tolist()] if tokenizer is None else token_texts(tokenizer, ids)


def _finite_columns(responses: StoredResponses, row: TrajectoryRow) -> dict[str, list[float | None]]:
    return {name: _finite(values.array) for name, values in responses.columns(row).items()}


def _finite(values: Array) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


# ---- the tokenizer of a run


class _ModelPart(msgspec.Struct, frozen=True):
    path: str


class _RunYaml(msgspec.Struct, frozen=True):
    """The only setting that samples need from `config.yaml`, so configs of other releases are readable."""

    model: _ModelPart


class _EvalOrigin(msgspec.Struct, frozen=True):
    """Source of an evaluation: `runs/<name>-<n>/checkpoints/<step>`, or a model folder."""

    path: str


def find_tokenizer(run: Path, model: Path | None) -> tuple[Tokenizer | None, str]:
    """Load the tokenizer of the folder `model` if it is given, else of the run's model.

    Returns the tokenizer and "", or None and the reason. Raises `ConfigError` if the folder `model` has none.
    """
    if model is not None:
        return _load(model), ""
    whys = []
    try:
        folders = [Path(_read_config(run).model.path), *_evaluated_models(run)]
    except ConfigError as error:
        return None, str(error)
    for folder in folders:
        try:
            return _load(folder), ""
        except ConfigError as error:
            whys.append(str(error))
    return None, whys[0]


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

_REPLACEMENT, _MOST_BYTES = "\ufffd", 4  # stands for broken bytes; bytes, and so tokens, of a character


def token_texts(tokenizer: Tokenizer, ids: IntArray) -> list[str]:
    """Return a text [L] for each of the tokens `ids`; their join is the decoded response.

    A character of several tokens stands with its last token: the three tokens of "é!" have the texts `["", "é",
    "!"]`. A token's text is the text that it adds to the token before it, as in vLLM's detokenizer. Where these
    texts do not join to the decoded response, the bounds between tokens are estimated by lengths.
    """

    def decode(start: int, end: int) -> str:
        return tokenizer.decode(ids[start:end], special=True)

    texts: list[str] = []
    before, start, read = "", 0, 0  # `before` is the text of tokens [start, read), the last ones with a text
    for end in range(1, len(ids) + 1):
        text = decode(start, end)
        if text.endswith(_REPLACEMENT) and end - read < _MOST_BYTES:
            texts.append("")
            continue
        texts.append(text[len(before) :])
        before, start, read = decode(read, end), read, end
    whole = decode(0, len(ids))
    if "".join(texts) == whole:
        return texts
    ends = list(accumulate(map(len, texts)))
    return [whole[start:end] for start, end in pairwise((0, *ends[:-1], len(whole)))]
