"""Tokenizers, files and problems for tests of the data."""

import json
from pathlib import Path

import msgspec
import tokenizers

from laminar_py.config.data import ChatConfig, SourceConfig
from laminar_py.data.chat import PromptEncoder
from laminar_py.data.problems import ProblemRow, ProblemSet, read_prompts
from laminar_py.data.sources import DataSource, source_at
from laminar_py.data.tokenizer import Tokenizer

GOOD = '{"prompt": "1+1=", "answer": "2"}'


def character_backend(characters: str = "?0123456789+=abc") -> tokenizers.Tokenizer:
    vocabulary = {character: index for index, character in enumerate(characters)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=characters[0]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", behavior="isolated")
    return backend


def text_encoder(
    backend: tokenizers.Tokenizer | None = None, *, eos_ids: tuple[int, ...] = (99,)
) -> PromptEncoder:
    """Encoder of a model without a template."""
    return PromptEncoder(
        Tokenizer(backend or character_backend(), eos_ids=eos_ids), Path("no-such-model"), ChatConfig()
    )


def written(path: Path, *lines: str, field: str = "data.train") -> DataSource:
    path.write_text("".join(line + "\n" for line in lines))
    return source_at(path, field)


def read(source: DataSource, *, max_prompt_tokens: int | None = 64, prefix: str = "") -> ProblemSet:
    return read_prompts(source, encoder=text_encoder(), max_prompt_tokens=max_prompt_tokens, prefix=prefix)


def source(path: Path | str, field: str = "data.train", **settings: object) -> DataSource:
    return DataSource(field, SourceConfig.model_validate({"path": str(path), **settings}))


def make_problems(
    count: int, *, of: str = "a.jsonl", prefix: str = "", name: str = "", fields: str = '{"level": ROW}'
) -> ProblemSet:
    """Problems whose ids are their rows, behind `prefix` and `name`, with the fields of the JSON."""
    problems = ProblemSet(source(of), encoder=text_encoder(), prefix=prefix)
    for row in range(count):
        given = {"prompt": str(row), "id": f"{name}{row}"} | json.loads(fields.replace("ROW", str(row)))
        written = json.dumps(given).encode()
        problems.add(row, msgspec.json.decode(written, type=ProblemRow), written, key=row)
    return problems
