"""What the learner exports is what plain transformers loads."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from laminar_py.learner.export import export_hf
from tests.learner.builders import full_parameters, make_learner, make_model_folder, make_sequences, pack


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
    hidden = learner.model.base_model(
        ids, position_ids=ids, use_cache=False, cu_seq_lens_q=torch.tensor([0, 10]), max_length_q=10
    )
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


def test_named_tensors_are_cast_and_skip_the_tied_head(tmp_path: Path):
    learner = make_learner(make_model_folder(tmp_path / "source", tied=True))
    tensors = dict(learner.named_tensors(dtype=torch.bfloat16))
    assert "lm_head.weight" not in tensors
    assert "model.embed_tokens.weight" in tensors
    assert all(tensor.dtype == torch.bfloat16 and tensor.is_contiguous() for tensor in tensors.values())
    masters = full_parameters(learner)
    assert all(torch.equal(tensor, masters[name].bfloat16()) for name, tensor in tensors.items())
