"""`laminar export`: what a run has learned, as any tool loads it; or one line."""

import asyncio
import json
import subprocess
from pathlib import Path

import peft
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from laminar_py.config.loading import dump_config, load_config
from laminar_py.config.section import ConfigError
from laminar_py.data.tokenizer import Tokenizer, load_tokenizer
from laminar_py.engines.local.engine import LocalEngine
from laminar_py.learner.marker import MARKER
from laminar_py.learner.model import policy_logprobs
from laminar_py.runtime.orchestrator.exports import Exported, export
from laminar_py.runtime.preflight.inputs import initial_folder
from tests.data.templates import EOS, TEMPLATES, make_tokenizer_folder
from tests.data.templates import SPECIAL as CHAT_SPECIAL
from tests.engines.engine_conformance import collect, make_request
from tests.learner.builders import (
    SETTINGS,
    VOCAB,
    full_parameters,
    make_learner,
    make_model_folder,
    make_sequences,
    pack,
)
from tests.ledger.runs import begin, checkpoint, open_ledger
from tests.runs.runs import LAMINAR, REPO

CHAT_VOCAB = 320
TURN_END = CHAT_SPECIAL.index("<|im_end|>")


def make_run(folder: Path, *settings: str, steps=2, template: str | None = None):
    """A run's folder with a checkpoint after each step, and the learner after the last."""
    folder.mkdir()
    source = make_model_folder(folder / "model", tied=True, vocab=VOCAB if template is None else CHAT_VOCAB)
    if template is None:
        write_tokenizer(source)
    else:
        make_tokenizer_folder(source, template)
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"eos_token_id": EOS}))
    config = load_config(REPO / "configs/quickstart.yaml", [f"model.path={source}", *settings])
    (folder / "config.yaml").write_text(dump_config(config))
    lora = config.learner.lora
    if lora is not None and config.warm_start is not None:
        source = make_model_folder(initial_folder(config), tied=True, seed=3)
    learner = make_learner(source, settings=SETTINGS.model_copy(update={"lora": lora}))

    async def record():
        async with open_ledger(folder) as ledger:
            begin(ledger, versions=range(steps + 1))
            for step in range(1, steps + 1):
                learner.step([pack(make_sequences(seed=step), num_total=6)])
                learner.save(folder / f"checkpoints/step-{step}")
                ledger.append(checkpoint(step, step))

    asyncio.run(record())
    return learner


def test_a_run_whose_model_is_gone_is_not_exported(tmp_path):
    make_run(tmp_path / "run", steps=1)
    (tmp_path / "run/model/config.json").unlink()
    with pytest.raises(ConfigError, match=r"^model\.path=.*/run/model: config.json cannot be read \(No such file"):
        export(tmp_path / "run", tmp_path / "out")


def test_the_newest_checkpoint_of_a_run_loads_in_transformers(tmp_path):
    learner = make_run(tmp_path / "run")
    assert export(tmp_path / "run", tmp_path / "out") == Exported(tmp_path / "run/checkpoints/step-2", 2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = full_parameters(learner)
    assert {name for name, _ in model.named_parameters()} == set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.named_parameters())
    assert (tmp_path / "out/tokenizer.json").is_file()
    assert not list(tmp_path.glob("out*.tmp"))


def test_a_named_checkpoint_in_the_type_asked_for(tmp_path):
    learner = make_run(tmp_path / "run", steps=1)
    first = full_parameters(learner)
    learner.step([pack(make_sequences(), num_total=6)])
    learner.save(tmp_path / "run/checkpoints/step-2")
    export(tmp_path / "run/checkpoints/step-1", tmp_path / "out", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(tensor, first[name].bfloat16()) for name, tensor in model.named_parameters())


SPECIAL = ("<bos>", "<eos>", "<pad>")
TEXTS = ("w7w33w4", "w60", "w12w12w12w5w40", "w9 w9")


def write_tokenizer(model: Path) -> Tokenizer:
    """Words `w3` to the last id, which no class of a `model_type` splits like this, after a `<bos>`."""
    words = {word: index for index, word in enumerate((*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), VOCAB))))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"w\d+"), behavior="isolated")
    backend.add_special_tokens(list(SPECIAL))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    backend.save(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text())
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    (model / "config.json").write_text(json.dumps(config | ends))
    return load_tokenizer(model)


def greedy_tokens(model: Path, weights: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens that a replica makes of prompts, as the ledger has them."""

    async def generate() -> list[list[int]]:
        engine = LocalEngine(model, max_batch=4, max_len=64, kv_capacity=256)
        await engine.start()
        await engine.load_weights(weights, 1)
        made = [await collect(engine, make_request(prompt=ids, length=24, stop_ids=(1,))) for ids in prompts]
        await engine.close()
        return [response.ids for response in made]

    return asyncio.run(generate())


@pytest.mark.parametrize("settings", [None, "{}", '{"clean_up_tokenization_spaces": false, "eos_token": "<eos>"}'])
def test_transformers_alone_makes_of_an_export_the_prompts_and_greedy_tokens_of_the_run(tmp_path, settings):
    learner = make_run(tmp_path / "run", steps=1)
    model = tmp_path / "run/model"
    ours = write_tokenizer(model)
    if settings is not None:
        (model / "tokenizer_config.json").write_text(settings)
    export(tmp_path / "run", tmp_path / "out")
    prompts = [ours.encode_prompt(text).tolist() for text in TEXTS]
    (tmp_path / "served").mkdir()
    save_file(full_parameters(learner), tmp_path / "served/model.safetensors")
    expected = greedy_tokens(model, tmp_path / "served", prompts)

    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    inputs = [theirs(text, return_tensors="pt") for text in TEXTS]
    assert [found.input_ids[0].tolist() for found in inputs] == prompts
    made = [policy.generate(**found, do_sample=False, max_new_tokens=24)[0].tolist() for found in inputs]
    assert made == [prompt + response for prompt, response in zip(prompts, expected, strict=True)]
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == SPECIAL


def test_a_tokenizer_that_names_its_class_is_exported_as_it_is(tmp_path):
    make_run(tmp_path / "run", steps=1)
    written = '{"tokenizer_class": "Qwen2Tokenizer", "chat_template": "{{ messages }}"}\n'
    (tmp_path / "run/model/tokenizer_config.json").write_text(written)
    export(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out/tokenizer_config.json").read_text() == written


@pytest.mark.parametrize("written", [None, {"temperature": 0.6, "do_sample": True, "eos_token_id": EOS}])
def test_transformers_alone_stops_an_exported_chat_model_where_a_turn_ends(tmp_path, written):
    make_run(tmp_path / "run", steps=1, template=TEMPLATES["chatml"].text)
    given = tmp_path / "run/model/generation_config.json"
    given.unlink(missing_ok=True)
    if written is not None:
        given.write_text(json.dumps(written))
    export(tmp_path / "run", tmp_path / "out")
    named = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert named == (written or {}) | {"eos_token_id": [TURN_END, EOS]}
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "out")

    def third_ends(ids, scores):
        """The model's own choice, but for the third token."""
        return (
            scores if ids.shape[1] != 6 else torch.full_like(scores, -1e9).index_fill(1, torch.tensor(TURN_END), 0)
        )

    made = policy.generate(
        torch.tensor([[40, 41, 42, 43]]), do_sample=False, max_new_tokens=9, logits_processor=[third_ends]
    )
    assert made.shape[1] == 7
    assert made[0, -1] == TURN_END
    assert load_tokenizer(tmp_path / "out").eos_ids == (TURN_END, EOS)


ADAPTED = ("learner.lora.rank=4", "learner.lora.alpha=8.0", "model.from_scratch=false")


def assert_same_policy(folder: Path, learner) -> None:
    row = pack(make_sequences(seed=9), num_total=6)
    expected, _ = policy_logprobs(learner.model, row)
    torch.testing.assert_close(policy_logprobs(make_learner(folder).model, row)[0], expected, rtol=0, atol=1e-5)


def test_a_run_of_adapters_is_exported_as_the_whole_model(tmp_path):
    learner = make_run(tmp_path / "run", *ADAPTED, "warm_start=null")
    export(tmp_path / "run", tmp_path / "out")
    assert_same_policy(tmp_path / "out", learner)
    names = set(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict())
    assert names == set(AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").state_dict())


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_adapters_of_a_run_alone_are_what_peft_and_transformers_read(tmp_path, dtype):
    learner = make_run(tmp_path / "run", *ADAPTED, "warm_start=null")
    model, out = tmp_path / "run/model", tmp_path / "out"
    exported = export(tmp_path / "run", out, dtype=dtype, adapter=True)
    assert exported == Exported(tmp_path / "run/checkpoints/step-2", 2, model)
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"], config["lora_alpha"]) == (str(model), 4, 8.0)
    tensors = load_file(out / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype or "float32")}
    assert not (out / "model.safetensors").exists()
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "others read the weights as the rest"
    assert AutoTokenizer.from_pretrained(out)("w7w33").input_ids == [0, 7, 33]
    if dtype is not None:
        return
    ids = torch.arange(12)[None]
    expected = AutoModelForCausalLM.from_pretrained(merged(tmp_path, learner))(ids).logits
    base = AutoModelForCausalLM.from_pretrained(model)
    assert not torch.allclose(base(ids).logits, expected, atol=1e-3)
    for found in (AutoModelForCausalLM.from_pretrained(out), peft.PeftModel.from_pretrained(base, out)):
        torch.testing.assert_close(found(ids).logits, expected, rtol=1e-4, atol=1e-4)


def merged(folder: Path, learner) -> Path:
    """The whole model, which is the learner's policy, in files that others may read, too."""
    export(folder / "run", folder / "whole")
    assert_same_policy(folder / "whole", learner)
    assert len({path.stat().st_mode for path in (folder / "whole").iterdir()}) == 1
    return folder / "whole"


def test_adapters_that_nobody_could_use_are_refused_in_one_line(tmp_path):
    make_run(tmp_path / "plain", "warm_start=null", steps=1)
    with pytest.raises(
        ConfigError, match=r"^--adapter: .*plain has no learner.lora and trains all weights; leave"
    ):
        export(tmp_path / "plain", tmp_path / "out", adapter=True)
    (tmp_path / "demonstrations.jsonl").write_text("{}")
    warm = (f"warm_start.data={tmp_path}/demonstrations.jsonl", f"warm_start.cache={tmp_path}/warm")
    make_run(tmp_path / "warm-run", *ADAPTED, *warm, steps=1)
    with pytest.raises(
        ConfigError, match=r"belong to the result of its warm start.*; leave --adapter out for the"
    ):
        export(tmp_path / "warm-run", tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()


def test_adapters_of_a_warm_start_are_merged_into_its_result_or_it_is_missed_in_one_line(tmp_path):
    data, cache = tmp_path / "demonstrations.jsonl", tmp_path / "warm"
    data.write_text("{}")
    warm = (f"warm_start.data={data}", f"warm_start.cache={cache}")
    learner = make_run(tmp_path / "run", *ADAPTED, *warm, steps=1)
    export(tmp_path / "run", tmp_path / "out")
    assert_same_policy(tmp_path / "out", learner)
    (base,) = cache.iterdir()
    make_model_folder(base, tied=True, seed=4)
    with pytest.raises(
        ValueError, match=r"step-1: was saved of .* base \w{8}, and this run has .*; set model.path"
    ):
        export(tmp_path / "run", tmp_path / "other")
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"warm_start.cache={cache}: no {base.name} in it.*; put it back"):
        export(tmp_path / "run", tmp_path / "other")
    data.unlink()
    with pytest.raises(ConfigError, match=rf"warm_start.data={data}: is gone; .*so put it back"):
        export(tmp_path / "run", tmp_path / "other")


def rotate_while_read(run: Path, monkeypatch, *, torn=False) -> None:
    """Have `step-2` of a run appear, and `step-1` go, while `step-1` is read."""
    checkpoints, newer = run / "checkpoints", run.with_name("newer")
    (checkpoints / "step-2").rename(newer)
    found = []

    def pruned(*arguments, **settings):
        """The run goes on while weights are read."""
        found.append(load(*arguments, **settings))
        if len(found) == 1:
            if torn:
                (checkpoints / "step-1/.metadata").unlink()
            else:
                (checkpoints / "step-1").rename(run.with_name("older"))
            newer.rename(checkpoints / "step-2")
        return found[-1]

    from laminar_py.learner import checkpoint as module

    load = module.read_marker
    monkeypatch.setattr(module, "read_marker", pruned)


@pytest.mark.parametrize("torn", [False, True])
def test_a_checkpoint_that_its_run_deletes_meanwhile_gives_way_to_a_newer_one(tmp_path, monkeypatch, torn):
    learner, out = make_run(tmp_path / "run"), tmp_path / "out"
    rotate_while_read(tmp_path / "run", monkeypatch, torn=torn)
    assert export(tmp_path / "run", out).checkpoint.name == "step-2"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert all(torch.equal(t, full_parameters(learner)[name]) for name, t in model.named_parameters())


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    make_run(tmp_path / "run", steps=1)

    def full(model, folder, **options):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        export(tmp_path / "run", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_cannot_be_exported_is_one_line(tmp_path):
    run = tmp_path / "run"
    make_run(run, steps=1)
    (tmp_path / "taken").mkdir()
    with pytest.raises(ValueError, match=r"out=.*taken: is there already"):
        export(run, tmp_path / "taken")
    for inside in (run / "out", run / "checkpoints/out", tmp_path / "taken/../run/out"):
        with pytest.raises(ValueError, match=r"out=.*out: is inside the run's own folder .*; name one outside"):
            export(run, inside)
    with pytest.raises(ValueError, match=r"source=.*taken: neither a run's folder nor a checkpoint in one"):
        export(tmp_path / "taken", tmp_path / "out")
    (run / "checkpoints/step-1" / MARKER).unlink()
    for source in (run, run / "checkpoints/step-1"):
        with pytest.raises(ValueError, match=r"step-1: half written or damaged \(has no complete.json\)"):
            export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_checkpoint_is_refused_with_exit_code_2(tmp_path):
    run = tmp_path / "run"
    make_run(run, steps=0)
    command = [LAMINAR, "export", str(run), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == f"laminar: run={run}: has no checkpoint yet; wait for its first one, or resume it\n"
