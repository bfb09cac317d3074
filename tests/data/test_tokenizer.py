"""The tokenizer of a model folder."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.config.section import ConfigError
from laminar_py.data.tokenizer import Tokenizer, load_tokenizer
from tests.data.builders import character_backend


def model_folder(path: Path, **files: str) -> Path:
    """A folder with a word-level tokenizer that would wrap every text in `<s>` ... `</s>` if it were let."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, "a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", behavior="isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.save(str(path / "tokenizer.json"))
    for name, text in files.items():
        (path / f"{name}.json").write_text(text)
    return path


def test_encoding_adds_nothing_and_decoding_shows_no_special_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model_folder(tmp_path, config='{"eos_token_id": 1}'))
    ids = tokenizer.encode("abba")
    assert ids.tolist() == [2, 3, 3, 2]
    assert tokenizer.decode(np.array([*ids, *tokenizer.eos_ids])) == "abba"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("ab", [0, 2, 3]),
        ("<s>ab", [0, 2, 3]),  # as a chat template writes it
        ("a<s>", [0, 2, 0]),
        ("", []),
    ],
)
def test_a_prompt_begins_once_with_what_the_post_processor_adds_before_it(
    tmp_path: Path, text: str, ids: list[int]
) -> None:
    tokenizer = load_tokenizer(model_folder(tmp_path, config='{"eos_token_id": 1}'))
    assert tokenizer.encode_prompt(text).tolist() == ids


MODELS = tokenizers.models


@pytest.mark.parametrize(
    ("model", "unknown"),
    [
        (MODELS.WordLevel({"a": 0, "?": 1}, "?"), ["b", "c"]),
        (MODELS.WordPiece({"a": 0, "?": 1}, unk_token="?"), ["b", "c"]),
        (MODELS.BPE({"a": 0, "?": 1}, [], unk_token="?"), ["b", "c"]),
        (MODELS.BPE({"a": 0, "?": 1}, [], unk_token="?", byte_fallback=True), []),
        (MODELS.BPE({"a": 0, "?": 1}, []), []),
        (MODELS.Unigram([("a", -1.0), ("?", -9.0)], 1, False), ["b", "c"]),
    ],
)
def test_words_that_become_the_unknown_token_are_told_and_the_token_itself_is_none(
    model: tokenizers.models.Model, unknown: list[str]
) -> None:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", behavior="isolated")
    tokenizer = Tokenizer(backend, eos_ids=(0,))
    assert tokenizer.unknown_words("ab?ac") == unknown
    assert tokenizer.has_unknown == bool(unknown)


def test_a_prompt_of_a_tokenizer_that_adds_nothing_has_its_own_ids_alone(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, config='{"eos_token_id": 1}')
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.ByteLevel()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode_prompt("abba").tolist() == tokenizer.encode("abba").tolist() == [2, 3, 3, 2]


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({"config": '{"eos_token_id": 1}'}, (1,)),
        ({"config": '{"eos_token_id": [1, 0]}'}, (1, 0)),
        ({"config": '{"eos_token_id": 0}', "generation_config": '{"eos_token_id": [1, 3]}'}, (1, 3)),
        ({"config": '{"eos_token_id": 1}', "generation_config": '{"pad_token_id": 0}'}, (1,)),
        ({"config": '{"eos_token_id": 1}', "tokenizer_config": '{"eos_token": "<s>"}'}, (1, 0)),
        ({"config": '{"eos_token_id": 1}', "tokenizer_config": '{"eos_token": {"content": "<s>"}}'}, (1, 0)),
        ({"config": '{"eos_token_id": [0, 1]}', "tokenizer_config": '{"eos_token": "</s>"}'}, (0, 1)),
        ({"config": '{"eos_token_id": 1}', "tokenizer_config": '{"eos_token": "<none>"}'}, (1,)),
        ({"config": '{"eos_token_id": 1}', "tokenizer_config": '{"eos_token": null}'}, (1,)),
    ],
)
def test_eos_ids_come_from_the_generation_config_first_and_from_the_tokenizer(
    tmp_path: Path, files: dict[str, str], eos_ids: tuple[int, ...]
) -> None:
    assert load_tokenizer(model_folder(tmp_path, **files)).eos_ids == eos_ids


@pytest.mark.parametrize("tokenizer_config", [None, "{}", '{"eos_token": null}'])
def test_a_tokenizer_without_an_end_of_its_own_does_not_end_at_the_word_none(
    tmp_path: Path, tokenizer_config
) -> None:
    files = {} if tokenizer_config is None else {"tokenizer_config": tokenizer_config}
    folder = model_folder(tmp_path, config='{"eos_token_id": 1}', **files)
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "None": 2}, "<s>"))
    backend.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).eos_ids == (1,)


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"config": "{}"}, r"no eos_token_id in its generation_config\.json or config\.json; "),
        ({}, r"no eos_token_id in its generation_config\.json or config\.json; "),
        ({"config": "{"}, r"config\.json cannot be read \(Input data was truncated\); "),
        ({"config": '{"eos_token_id": "</s>"}'}, r"config\.json cannot be read .*eos_token_id.*; "),
        ({"tokenizer_config": '{"eos_token": {}}'}, r"tokenizer_config\.json cannot be read .*`content`.*; "),
    ],
)
def test_a_folder_without_usable_eos_id_is_refused(tmp_path: Path, files: dict[str, str], fault: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.path={tmp_path}: {fault}"):
        load_tokenizer(model_folder(tmp_path, **files))


def test_a_config_that_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    (folder / "config.json").write_bytes(b'{"eos_token_id": "\xff"}')
    with pytest.raises(ConfigError, match=r"config\.json cannot be read .*; fix the file$"):
        load_tokenizer(folder)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path=.*: no tokenizer\.json in it; "):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("normalizer", [None, tokenizers.normalizers.NFC()])
@given(text=st.text(min_size=1) | st.text(alphabet="a\u0344\ufb2c <s>/", min_size=1, max_size=30))
def test_a_tokenizer_of_bytes_makes_at_most_so_many_ids_of_a_text_and_at_least_one(normalizer, text) -> None:
    tokenizer = bytewise(add_prefix_space=True, normalizer=normalizer)
    most = tokenizer.max_ids(text)
    assert most is not None
    assert 1 <= len(tokenizer.encode_prompt(text)) <= most
    assert tokenizer.count([text] * 2, begun=True) == [len(tokenizer.encode_prompt(text))] * 2
    assert tokenizer.count([text] * 2, begun=False) == [len(tokenizer.encode(text))] * 2


def test_nothing_is_known_of_other_tokenizers() -> None:
    assert Tokenizer(character_backend(), eos_ids=(1,)).max_ids("a") is None
    assert bytewise(normalizer=tokenizers.normalizers.NFKC()).max_ids("a") is None


def bytewise(*, add_prefix_space: bool = False, normalizer: tokenizers.normalizers.Normalizer | None) -> Tokenizer:
    """A tokenizer of bytes that puts `<s>` before a text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({one: id for id, one in enumerate(["<s>", *alphabet])}, [])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.add_special_tokens(["<s>"])
    if normalizer is not None:
        backend.normalizer = normalizer
    ids = [("<s>", 0)]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=ids)
    return Tokenizer(backend, eos_ids=(1,))
