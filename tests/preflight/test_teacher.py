"""A teacher has the tokens of the policy and room for its trajectories, or a run does not start."""

import json
import shutil

import pytest

from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.runtime.preflight import teacher
from tests.engines.sglang.scoring_server import scoring_server
from tests.runs.runs import REPO, quickstart_model

MODEL = quickstart_model()
TOKENIZER = load_tokenizer(MODEL)
TEXTS = ("e-2;o*7;1x5?",)


def check(place):
    settings = ["algorithm.name=distill", f"algorithm.teacher={place}", "rollout.without_signal=train"]
    teacher.check_teacher(load_config(REPO / "configs/quickstart.yaml", settings), TOKENIZER, texts=TEXTS)


def changed(folder, name, change):
    """A copy of the quickstart's model, a file of which is another."""
    shutil.copytree(MODEL, folder)
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    return folder


def swap(tokenizer):
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [word for word, id in sorted(vocabulary.items(), key=lambda pair: pair[1]) if id in (7, 8)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def unname(tokenizer):
    tokenizer["added_tokens"][-1]["special"] = False


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("tokenizer.json", swap, "its tokenizer differs at id 7: .*; name a teacher with the tokenizer of model"),
        ("tokenizer.json", unname, "differs in the special tokens: id 2 is one"),
        ("tokenizer.json", lambda content: content.clear(), r"its tokenizer.json cannot be read \("),
        (
            "config.json",
            lambda config: config.update(vocab_size=9),
            "has a vocabulary of 9 tokens, the policy one",
        ),
        (
            "config.json",
            lambda config: config.update(max_position_embeddings=64),
            "has 64 positions, below rollout",
        ),
    ],
)
def test_a_folder_with_other_tokens_or_too_little_room_is_refused(tmp_path, name, change, words):
    folder = changed(tmp_path / "m", name, change)
    with pytest.raises(ConfigError, match=rf"^algorithm\.teacher={folder}: .*{words}") as caught:
        check(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_with_the_same_tokens_and_more_unused_rows_is_accepted(tmp_path):
    check(MODEL)
    check(changed(tmp_path / "m", "config.json", lambda config: config.update(vocab_size=128)))


def encode(text):
    return TOKENIZER.encode(text).tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"longest": None}, ""),
        ({"tokenize": lambda text: encode(text)[::-1]}, "its tokenizer gives 'e-2;o"),
        (
            {"tokenize": lambda text: [9 if id in TOKENIZER.eos_ids else id for id in encode(text)]},
            "gives '<pad><eos>",
        ),
        ({"tokenize": lambda text: [9 if id == 40 else id for id in encode(text)]}, "its tokenizer gives "),
        ({"model_path": "FOLDER"}, "its tokenizer differs at id 7"),
        ({"vocab": 9}, "generate was refused with 400"),
        ({"longest": 400}, "scores at most 399 tokens, below rollout.max_len=448"),
        ({"failing": 99}, "answered 503 to model_info"),
    ],
)
def test_a_server_with_other_tokens_or_too_little_room_is_refused(tmp_path, change, words):
    folder = changed(tmp_path / "m", "tokenizer.json", swap)
    with scoring_server(vocab=1000) as server:
        server.tokenize = encode
        for name, value in change.items():
            setattr(server, name, str(folder) if value == "FOLDER" else value)
        if not words:
            check(server.url)
            return
        with pytest.raises(ConfigError, match=rf"^algorithm\.teacher={server.url}: .*{words}") as caught:
            check(server.url)
    assert "\n" not in str(caught.value)
