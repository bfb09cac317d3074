"""Problems of a run: sources side by side, prompts of messages, and what ends a response to them."""

import json
import shutil
from pathlib import Path

import pytest

from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.records.trajectory import Prompt
from laminar_py.runtime.preflight.inputs import Inputs, check_inputs
from tests.data.templates import EOS, SPECIAL, TEMPLATES, make_tokenizer_folder
from tests.runs.runs import REPO, quickstart_model

END = SPECIAL.index("<|im_end|>")


def make_inputs(
    folder: Path, *settings: str, template: str | None = TEMPLATES["chatml"].text, trains: bool = True
) -> Inputs:
    """Inputs of a run whose model has a template, and whose problems are messages in two sources."""
    model = folder / "model"
    shutil.copytree(quickstart_model(), model, dirs_exist_ok=True)
    (model / "generation_config.json").unlink(missing_ok=True)  # ends that go before those of the config
    sizes = json.loads((model / "config.json").read_text()) | {"vocab_size": 300, "eos_token_id": EOS}
    (model / "config.json").write_text(json.dumps(sizes))
    make_tokenizer_folder(model, template)
    for name in ("sums", "products", "aime"):
        row = {"prompt": [{"role": "user", "content": name}], "answer": "4", "id": "same"}
        (folder / f"{name}.jsonl").write_text(json.dumps(row))
    train = f"[{{path: {folder}/sums.jsonl, task: s, weight: 3}}, {folder}/products.jsonl]"
    given = [
        f"model.path={model}",
        "warm_start=null",
        "data.prepare=null",
        f"eval.sets={{a: {folder}/aime.jsonl}}",
    ]
    config = load_config(REPO / "configs/quickstart.yaml", [*given, f"data.train={train}", *settings])
    return check_inputs(config, trains=trains)


def test_sources_side_by_side_keep_their_ids_apart_and_tasks_of_their_own(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    drawn: list[Prompt] = [inputs.stream.prompt(place) for place in range(1000)]
    assert {prompt.id: prompt.task for prompt in drawn} == {"train.0/same": "s", "train.1/same": ""}
    assert sum(prompt.task == "s" for prompt in drawn) == 750
    assert [prompt.id for prompt in inputs.sets["a"]] == ["a/same"]


def test_an_evaluation_asks_no_teacher(tmp_path: Path) -> None:
    settings = ["algorithm={name: distill, teacher: 'http://127.0.0.1:9'}"]
    assert make_inputs(tmp_path, *settings, trains=False).sets
    with pytest.raises(ConfigError, match=r"algorithm\.teacher="):
        make_inputs(tmp_path, *settings)


def test_where_prompts_are_messages_the_end_of_a_turn_ends_responses_and_the_start_says_so(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path, "data.chat.system=Be brief.")
    assert inputs.tokenizer.eos_ids == (END, EOS)
    first, *lines = inputs.example.splitlines()
    assert (
        first
        == f"prompt train.0/same, 42 tokens; a response ends with '<|im_end|>' (id {END}) or '</s>' (id {EOS})"
    )
    assert lines[:3] == ["  <|im_start|>system", "  Be brief.<|im_end|>", "  <|im_start|>user"]


def test_messages_for_a_model_without_a_template_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^data\.train\.0=.*sums\.jsonl:1: messages, and .* has no chat template"
    ):
        make_inputs(tmp_path, template=None)


def test_a_leak_names_its_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^eval\.sets\.a=.*s\.jsonl:1: prompt also in data\.train\.1=.*:1 in "):
        make_inputs(tmp_path, f"eval.sets.a={tmp_path}/products.jsonl")


def test_what_does_not_train_reads_nothing_to_train_on(tmp_path: Path) -> None:
    rewards = "reward={use: [math], by_task: {elsewhere: [math]}}"
    inputs = make_inputs(tmp_path, f"data.train={tmp_path}/nowhere.jsonl", rewards, trains=False)
    assert list(inputs.digests) == ["eval.sets.a"]
    assert inputs.example.startswith("prompt a/same, ")


def test_where_only_a_warm_start_has_messages_the_end_of_a_turn_ends_responses_too(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "warm.jsonl").write_text(json.dumps({"messages": turns}))
    (tmp_path / "text.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}')
    (tmp_path / "other.jsonl").write_text('{"prompt": "2+3=", "answer": "5"}')
    texts = [f"data.train={tmp_path}/text.jsonl", f"eval.sets={{a: {tmp_path}/other.jsonl}}"]
    assert make_inputs(tmp_path, *texts).tokenizer.eos_ids == (EOS,)
    warm = f"warm_start={{data: {tmp_path}/warm.jsonl, steps: 1, cache: {tmp_path}/warm}}"
    assert make_inputs(tmp_path, *texts, warm).tokenizer.eos_ids == (END, EOS)


def test_other_demonstrations_have_another_digest(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}')
    (tmp_path / "other.jsonl").write_text('{"prompt": "2+3=", "answer": "5"}')
    texts = [f"data.train={tmp_path}/text.jsonl", f"eval.sets={{a: {tmp_path}/other.jsonl}}"]
    warm = f"warm_start={{data: {tmp_path}/warm.jsonl, steps: 1, cache: {tmp_path}/warm}}"
    found = []
    for response in ("b", "c", "b"):
        (tmp_path / "warm.jsonl").write_text(json.dumps({"prompt": "a", "response": response}))
        found.append(make_inputs(tmp_path, *texts, warm).digests["warm_start.data"])
    assert found[0] == found[2] != found[1]


def test_a_prompt_for_an_environment_is_shown_up_to_the_beginning_of_the_response(tmp_path: Path) -> None:
    tools = "environment={kind: tools, tools: {use: [calculator], shown_in: prompt}, most_kept: 4096}"
    *_, last = make_inputs(tmp_path).example.splitlines()
    with_tools = make_inputs(tmp_path, tools, "reward.use=[math]").example.splitlines()
    *_, about, opened, after = with_tools
    assert (about[:21], opened, after) == ("then messages of the ", "  <|im_start|>assistant", last)
