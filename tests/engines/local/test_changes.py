"""Changed positions in the packed weights of the embedded engine, for each model and pair of types."""

import json

import pytest
import torch
from safetensors.torch import save_file

from laminar_py.engines.changes import check_changes
from laminar_py.engines.local.model import LocalModel
from laminar_py.engines.local.spec import ModelSpec
from laminar_py.records.engine import RefusedError
from tests.engines.changes import nudged, read_version, write_changes
from tests.engines.local.test_adapter import save_adapter
from tests.engines.local.test_engine import MODELS, save_model, serving
from tests.engines.sglang.rig import make_model

TYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")]


def recast(folder, *, served, published):
    """The model of an engine in one type, with files in another."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": served}))
    tensors = {name: tensor.to(getattr(torch, published)) for name, tensor in read_version(folder).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("served", "published"), TYPES)
@pytest.mark.parametrize("kind", MODELS)
def test_changes_leave_the_tensors_of_a_whole_load(kind, served, published, tmp_path):
    folder = recast(save_model(tmp_path / "v1", kind), served=served, published=published)
    after = nudged(folder, tmp_path / "v2", share=0.1)
    file = write_changes(folder, after, tmp_path / "changes", base=1, version=2)
    spec = ModelSpec.read(folder)
    changed, whole = LocalModel(spec, max_len=16), LocalModel(spec, max_len=16)
    changed.load(folder)
    before = changed.checksum()
    changed.change(check_changes([file], 2, served=1, sizes=changed.sizes))
    whole.load(after)
    assert changed.checksum() == whole.checksum()
    pairs = zip(changed._weights._tensors(), whole._weights._tensors(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)  # those that are made from others, too
    still = [name for name, value in changed.checksum().tensors.items() if before.tensors[name] == value]
    assert not still, "each tensor had changes"


@pytest.mark.parametrize("kind", MODELS)
def test_a_weight_that_changed_by_one_rounding_has_another_hash(kind, tmp_path):
    widths = {"head_dim": 24} if kind.startswith("qwen3") else {}  # the root of 16 is exact
    folder = recast(save_model(tmp_path / "v1", kind, **widths), served="float32", published="float32")
    values, up = torch.linspace(1, 2, 4096), torch.tensor(torch.inf)
    first = read_version(folder)
    for name, tensor in first.items():
        root = tensor.shape[-1] ** 0.5
        lost = values[values * root == values.nextafter(up) * root]  # by a product with the root of a norm's width
        if name.endswith("norm.weight"):
            tensor.fill_(lost[0])
    model = LocalModel(ModelSpec.read(folder), max_len=16)
    found = []
    for tensors in (first, {name: tensor.nextafter(up) for name, tensor in first.items()}):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        model.load(folder)
        found.append(model.checksum().tensors)
    assert not [name for name, value in found[0].items() if found[1][name] == value]


def test_a_change_makes_nothing_of_a_tensors_size(tmp_path):
    folder = make_model(tmp_path / "v1", seed=0, vocab=4096)
    file = write_changes(folder, nudged(folder, tmp_path / "v2"), tmp_path / "changes", base=1, version=2)
    model = LocalModel(ModelSpec.read(folder), max_len=16)
    model.load(folder)
    changes = check_changes([file], 2, served=1, sizes=model.sizes)
    with torch.profiler.profile(profile_memory=True) as profile:
        model.change(changes)
    most = max(event.cpu_memory_usage for event in profile.events())
    largest = max(tensor.nbytes for tensor in read_version(folder).values())
    assert 0 < most < largest / 8


async def test_changes_of_a_merged_adapter_are_refused(tmp_path):
    base = save_model(tmp_path / "base")
    file = write_changes(base, nudged(base, tmp_path / "v2"), tmp_path / "changes", base=2, version=3)
    async with serving(base) as engine:
        assert engine.takes_changes
        await engine.load_weights(save_adapter(tmp_path / "adapter", base), 2)
        assert not engine.takes_changes
        with pytest.raises(RefusedError, match="load the whole version"):
            await engine.check_changes([file], 3)
