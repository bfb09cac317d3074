"""What transformers would load otherwise than engines do is refused before anything is trained."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from laminar_contrib.supervised.kind import refuse_large_model
from laminar_py.cli import app
from laminar_py.config.data import ModelConfig
from laminar_py.config.section import ConfigError
from laminar_py.learner.model import load_frozen, load_policy
from laminar_py.learner.model_folder import check_tied_head, stored_tensors
from laminar_py.runtime.preflight import inputs
from laminar_py.runtime.preflight.inputs import initial_folder
from tests.builders import make_config
from tests.learner.builders import VOCAB, make_learner, make_mixture_folder, make_model_folder
from tests.runs.runs import REPO
from tests.runs.test_bad_input import in_process

CPU = torch.device("cpu")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
WORDS = f"config.json ties the output head to the embedding, but {HEAD} and {EMBEDDING} differ; set tie_word"


def rewrite(folder: Path, change, *, files: int = 1) -> Path:
    """Write the folder's weights again after `change`, in so many files."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    (folder / "model.safetensors").unlink()
    for number in range(files):
        part = {name: weights[name] for place, name in enumerate(sorted(weights)) if place % files == number}
        name = "model.safetensors" if files == 1 else f"model-{number}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
    return folder


def with_head(difference: float, *, dtype: torch.dtype = torch.float32):
    def change(weights):
        weights[HEAD] = weights[EMBEDDING].clone()
        weights[HEAD][7, 3] += difference
        weights[HEAD] = weights[HEAD].to(dtype)

    return change


def run_config(model: Path, **algorithm):
    return make_config(steps=6, model={"path": str(model)}, algorithm=algorithm)


@pytest.mark.parametrize("files", [1, 2])
def test_a_tied_head_that_differs_from_the_embedding_is_refused_before_a_run(tmp_path: Path, files: int):
    folder = rewrite(make_model_folder(tmp_path / "m", tied=True), with_head(1e-3), files=files)
    with pytest.raises(ConfigError, match=f"^model.path={folder}: {WORDS}"):
        inputs.check_model(run_config(folder))
    sound = make_model_folder(tmp_path / "sound")
    with pytest.raises(ConfigError, match=f"^algorithm.reference={folder}: {WORDS}"):
        inputs.check_model(run_config(sound, reference=str(folder), kl_coef=0.1))
    inputs.check_model(run_config(sound, reference=str(folder)))  # which no loss needs


def test_a_command_says_it_in_one_line_and_ends_with_code_2(tmp_path: Path, monkeypatch, capsys):
    folder = rewrite(make_model_folder(tmp_path / "m", tied=True), with_head(1e-3))
    capsys.readouterr()  # of the builder
    code, (line,) = in_process(monkeypatch, capsys, f"model.path={folder}", "model.from_scratch=false")
    assert code == 2
    assert line.startswith(f"laminar: model.path={folder}: {WORDS}")


@pytest.mark.parametrize("on_meta", [False, True])
def test_no_rank_loads_it(tmp_path: Path, on_meta: bool):
    """Also where the config leaves the key out and the family ties by default, since transformers decides here."""
    folder = rewrite(make_model_folder(tmp_path / "m", tied=True), with_head(1e-3))
    with pytest.raises(ConfigError, match=WORDS):
        load_policy(ModelConfig(path=folder), seed=0, temperature=1.0, device=CPU, on_meta=on_meta)
    with pytest.raises(ConfigError, match=WORDS):
        load_frozen(
            folder,
            field="algorithm.reference",
            vocab_size=VOCAB,
            temperature=1.0,
            device=CPU,
            on_meta=on_meta,
        )


def test_data_and_doctor_refuse_it_too_and_need_no_weights(tmp_path: Path, monkeypatch):
    folder = rewrite(make_model_folder(tmp_path / "m", tied=True), with_head(1e-3))
    monkeypatch.chdir(REPO)
    for command in (["data"], ["doctor", "--pretend", "1x16xCPU"]):
        given = [*command, "configs/quickstart.yaml", f"model.path={folder}", "model.from_scratch=false"]
        told = CliRunner().invoke(app, given)
        assert told.exit_code != 0, command
        assert WORDS in " ".join(f"{told.output} {told.exception}".split()), told.output
    (folder / "model.safetensors").unlink()
    inputs.check_model(run_config(folder), needs_weights=False)


def test_an_equal_head_beside_a_tied_embedding_is_the_embedding(tmp_path: Path):
    folder = rewrite(make_model_folder(tmp_path / "m", tied=True), with_head(0.0))
    inputs.check_model(run_config(folder))
    model = make_learner(folder).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_untied_head_may_differ_and_a_damaged_file_is_for_its_reader(tmp_path: Path):
    inputs.check_model(run_config(make_model_folder(tmp_path / "m")))
    tied = make_model_folder(tmp_path / "tied", tied=True)
    for number, text in enumerate(
        (b"", b"version https://git-lfs.github.com/spec/v1", b"\x02" + b"\0" * 7 + b"[]")
    ):
        (tied / f"{number}.safetensors").write_bytes(text)
    check_tied_head(tied)
    assert stored_tensors(tied)[EMBEDDING][0] == VOCAB * 32


def test_a_head_of_another_dtype_differs(tmp_path: Path):
    folder = rewrite(make_model_folder(tmp_path / "m", tied=True), with_head(0.0, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=WORDS):
        check_tied_head(folder)


@pytest.mark.parametrize("name", [HEAD, "model.layers.1.mlp.up_proj.weight"])
def test_a_weight_that_no_file_has_is_not_drawn_at_random(tmp_path: Path, name: str):
    folder = rewrite(make_model_folder(tmp_path / "m"), lambda weights: weights.pop(name))
    with pytest.raises(ConfigError, match=f"^model.path={folder}: its safetensors have no {name}; name a folder"):
        make_learner(folder)


def test_experts_in_one_tensor_are_not_missing(tmp_path: Path):
    make_learner(make_mixture_folder(tmp_path / "m"))


# ---- the size of a warm start


def large(folder: Path, *, layers: int, from_scratch: bool):
    """A config with a warm start of a model of 8.4 million weights a layer and 102 million of embeddings."""
    folder.mkdir()
    sizes = {"vocab_size": 100_000, "hidden_size": 1024, "intermediate_size": 1365, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps({**sizes, "tie_word_embeddings": True}))
    if not from_scratch:  # a header is enough: nothing is read behind it
        offsets = {"dtype": "BF16", "data_offsets": [0, 0]}
        header = {"a": {**offsets, "shape": [100_000, 1024]}, "b": {**offsets, "shape": [layers, 8_387_584]}}
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    warm_start = {"data": str(folder.parent / "t"), "cache": str(folder.parent / "c")}
    return make_config(model={"path": str(folder), "from_scratch": from_scratch}, warm_start=warm_start)


@pytest.mark.parametrize("from_scratch", [False, True])
def test_a_warm_start_of_more_than_half_a_billion_weights_is_refused(tmp_path: Path, from_scratch: bool):
    refuse_large_model(large(tmp_path / "small", layers=47, from_scratch=from_scratch))
    config = large(tmp_path / "large", layers=48, from_scratch=from_scratch)
    (tmp_path / "large" / "tokenizer.json").write_text("{}")
    (tmp_path / "t").write_text("demonstrations")
    with pytest.raises(
        ConfigError, match=r"^warm_start: model\.path=.* has 0\.51 billion parameters, .* leave warm"
    ):
        refuse_large_model(config)
    initial_folder(config).mkdir(parents=True)
    refuse_large_model(config)  # its result is in the cache
