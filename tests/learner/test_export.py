"""What the learner exports is what plain transformers loads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from laminar_py.learner import export
from laminar_py.learner.export import export_hf
from tests.learner.builders import (
    full_parameters,
    make_learner,
    make_mixture_folder,
    make_model_folder,
    make_sequences,
    pack,
)


@pytest.mark.parametrize("tied", [False, True])
def test_exported_folder_loads_with_equal_logits(tmp_path: Path, tied: bool):
    source = make_model_folder(tmp_path / "source", tied=tied)
    learner = make_learner(source)
    learner.step([pack(make_sequences(), num_total=6)])
    export_hf(learner.model, tmp_path / "out", source=source, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert plain.dtype == torch.float32
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, learner.model.get_parameter(name))
    ids = torch.arange(10)[None]
    whole = {f"cu_seq_lens_{of}": torch.tensor([0, 10]) for of in "qk"} | {f"max_length_{of}": 10 for of in "qk"}
    hidden = learner.model.base_model(ids, position_ids=ids, use_cache=False, **whole)
    logits = hidden.last_hidden_state @ learner.model.get_output_embeddings().weight.t()
    torch.testing.assert_close(plain(ids).logits, logits, rtol=1e-5, atol=1e-5)


def test_exported_names_and_files_are_those_of_the_source(tmp_path: Path):
    source = make_model_folder(tmp_path / "source", tied=True)
    learner = make_learner(source)
    export_hf(learner.model, tmp_path / "out", source=source, dtype=torch.bfloat16)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    with (
        safe_open(source / "model.safetensors", "pt") as before,
        safe_open(tmp_path / "out" / "model.safetensors", "pt") as after,
    ):
        assert sorted(after.keys()) == sorted(before.keys())
        assert after.get_tensor("model.norm.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("make", [make_model_folder, make_mixture_folder])
def test_a_large_model_is_written_in_files_with_an_index_and_reads_back_equal(tmp_path: Path, monkeypatch, make):
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)
    source = make(tmp_path / "source")
    learner = make_learner(source)
    learner.step([pack(make_sequences(), num_total=6)])
    learner.save(tmp_path / "step-1")
    expected = dict(learner.named_tensors(dtype=torch.bfloat16))
    export.export_checkpoint(tmp_path / "step-1", tmp_path / "out", source=source, dtype="bfloat16")
    files = sorted(path for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    written = {path: load_file(path) for path in files}
    for path, tensors in written.items():
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 20_000, path
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: path.name for path, tensors in written.items() for name in tensors}
    together = {name: tensor for tensors in written.values() for name, tensor in tensors.items()}
    assert together.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in together.items())
    plain, whole = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "out", source))
    assert plain.dtype == torch.bfloat16
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, learner.model.get_parameter(name).bfloat16())
        assert parameter.shape == whole.get_parameter(name).shape
    assert (
        not (tmp_path / "out" / "generation_config.json").exists() or (source / "generation_config.json").exists()
    )


def test_generation_settings_that_transformers_reads_but_does_not_write_are_copied(tmp_path: Path):
    source = make_model_folder(tmp_path / "source")
    text = '{"temperature": 0.6, "top_p": 0.9, "eos_token_id": [3, 5]}'
    (source / "generation_config.json").write_text(text)
    export_hf(make_learner(source).model, tmp_path / "out", source=source, dtype=torch.float32)
    assert (tmp_path / "out" / "generation_config.json").read_text() == text


def test_named_tensors_are_cast_and_skip_the_tied_head(tmp_path: Path):
    learner = make_learner(make_model_folder(tmp_path / "source", tied=True))
    tensors = dict(learner.named_tensors(dtype=torch.bfloat16))
    assert "lm_head.weight" not in tensors
    assert "model.embed_tokens.weight" in tensors
    assert all(tensor.dtype == torch.bfloat16 and tensor.is_contiguous() for tensor in tensors.values())
    masters = full_parameters(learner)
    assert all(torch.equal(tensor, masters[name].bfloat16()) for name, tensor in tensors.items())
