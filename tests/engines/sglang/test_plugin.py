"""The plugin's places: loaders as SGLang's write them, each rank of two; and the plugin in real servers."""

import asyncio
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import save_file

from laminar_py.engines.sglang.plugin import laminar_changes
from laminar_py.engines.sglang.plugin.laminar_changes import (
    HALF_CHANGED,
    Place,
    UnfitError,
    check_model,
    layout_of,
    read_changes,
    record,
)
from laminar_py.engines.sglang.server import SGLangServer
from laminar_py.records.engine import EngineLostError, PauseMode, RefusedError
from tests.engines import engine_conformance as laws
from tests.engines.changes import kind_of_mapping, load_changes, nudged, read_version, write_changes
from tests.engines.engine_conformance import collect, make_request
from tests.engines.sglang.rig import make_model, make_spec
from tests.engines.sglang.test_engine import client

HIDDEN, HEADS, INNER, EXPERTS, VOCAB = 8, 12, 20, 3, 30
FILES = {
    "embed": (VOCAB, HIDDEN),
    "q": (HEADS, HIDDEN),
    "k": (HEADS // 2, HIDDEN),
    "o": (HIDDEN, HEADS),
    "norm": (HIDDEN,),
    **{f"expert.{number}.{part}": (INNER, HIDDEN) for number in range(EXPERTS) for part in ("gate", "up")},
    **{f"expert.{number}.down": (HIDDEN, INNER) for number in range(EXPERTS)},
}


class Sliced(torch.nn.Module):
    """A model of one of two ranks: fused rows, sliced columns, stacked and transposed experts, a padded and a tied
    embedding. Its loader narrows, transposes and copies as SGLang's loaders do."""

    def __init__(self, rank, dtype=torch.float32):
        super().__init__()
        self.rank = rank
        shapes = {
            "embed": (VOCAB // 2 + 5, HIDDEN),
            "qk": (HEADS // 2 + HEADS // 4, HIDDEN),
            "o": (HIDDEN, HEADS // 2),
            "norm": (HIDDEN,),
            "w13": (EXPERTS, INNER, HIDDEN),
            "w2": (EXPERTS, INNER // 2, HIDDEN),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    def half(self, weight, dim):
        size = weight.shape[dim] // 2
        return weight.narrow(dim, self.rank * size, size)

    def load_weights(self, weights):
        for name, weight in weights:
            weight = weight.to("cpu").contiguous()
            if name == "embed":
                part = self.half(weight, 0)
                self.embed[: part.shape[0]].data.copy_(part)
                self.embed[part.shape[0] :].data.fill_(0)
            elif name in ("q", "k"):
                part, start = self.half(weight, 0), 0 if name == "q" else HEADS // 2
                self.qk.data.narrow(0, start, part.shape[0]).copy_(part)
            elif name == "o":
                self.o.data.copy_(self.half(weight, 1))
            elif name == "norm":
                self.norm.data.copy_(weight)
            else:
                _, number, part = name.split(".")
                if part == "down":
                    self.w2.data[int(number)].copy_(self.half(weight, 1).transpose(-2, -1))
                else:
                    start = 0 if part == "gate" else INNER // 2
                    self.w13.data[int(number)].narrow(0, start, INNER // 2).copy_(self.half(weight, 0))


def write(folder, *, seed, dtype=torch.bfloat16):
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in FILES.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def loaded(folder, rank, dtype):
    model = Sliced(rank, dtype)
    model.load_weights(read_version(folder).items())
    return model


def equal(one, other):
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == also and torch.equal(tensor, twin) for (name, tensor), (also, twin) in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_whole_load_and_changes_leave_what_the_models_own_loader_leaves(rank, dtype, tmp_path):
    first, second = write(tmp_path / "v1", seed=0), write(tmp_path / "v2", seed=1)
    third = nudged(second, tmp_path / "v3", share=0.2)
    model = loaded(first, rank, dtype)
    places = record(model, layout_of(first))
    assert equal(model, loaded(first, rank, dtype)), "recording writes nothing"
    places.compare(first)
    places.load(second)
    assert equal(model, loaded(second, rank, dtype))
    file = write_changes(second, third, tmp_path / "changes", base=2, version=3)
    changes = read_changes(file)
    assert kind_of_mapping(file) == {"s"}, "strict overcommit charges a private one"
    places.change(changes)
    assert equal(model, loaded(third, rank, dtype))
    with pytest.raises(UnfitError, match="served in another form"):
        places.compare(second)


def alone(work):
    """Of `_all_ranks` its answer where there is one rank."""
    try:
        work()
    except (UnfitError, MemoryError, OSError, RuntimeError) as error:
        return str(error)
    return None


def test_an_error_amid_changes_is_told_from_refused_ones(tmp_path, monkeypatch):
    first = write(tmp_path / "v1", seed=0)
    second = nudged(first, tmp_path / "v2", share=0.2)
    model = loaded(first, 0, torch.bfloat16)
    updater = SimpleNamespace(get_model=lambda: model)
    file = write_changes(first, second, tmp_path / "changes", base=1, version=2)
    monkeypatch.setattr(laminar_changes, "_all_ranks", alone)
    monkeypatch.setitem(laminar_changes._known, model, record(model, layout_of(first)))
    assert "No such file" in laminar_changes._change(updater, [file, tmp_path / "missing"])
    with monkeypatch.context() as patch:
        patch.setattr(laminar_changes._known[model], "_memory", [])
        assert laminar_changes._change(updater, [file]) == "the parameters have moved"
    assert equal(model, loaded(first, 0, torch.bfloat16))
    put, done = Place.put, []

    def put_one(place, at, to):
        if done:
            raise MemoryError("no room")
        done.append(place)
        put(place, at, to)

    monkeypatch.setattr(Place, "put", put_one)
    assert laminar_changes._change(updater, [file]) == f"{HALF_CHANGED} no room"


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda model, weight: model.norm.data.copy_(weight * 0.5), "the model's loader calls"),
        (lambda model, weight: model.norm.data.copy_(weight.float()), "the model's loader calls"),
        (lambda model, weight: model.norm.data.copy_(weight.to(torch.float64)), "casts to torch.float64"),
        (lambda model, weight: model.norm.data.copy_(weight[:1]), "copies"),
        (lambda model, weight: model.norm.data.__setitem__(slice(None), weight), "the model's loader calls"),
        (lambda model, weight: model.norm.data.add_(weight), "the model's loader calls"),
        (lambda model, weight: model.norm.data.fill_(weight[0].item()), None),
    ],
)
def test_a_loader_that_changes_values_is_not_recorded(loader, words, tmp_path):
    folder = write(tmp_path / "v1", seed=0)
    model = Sliced(0)
    model.load_weights = lambda weights: [loader(model, weight) for name, weight in weights if name == "norm"]
    with pytest.raises((UnfitError, RuntimeError), match=words):
        record(model, layout_of(folder))
    assert not model.norm.any()


def test_parameters_that_moved_and_other_tensors_are_no_place(tmp_path):
    folder = write(tmp_path / "v1", seed=0)
    model = loaded(folder, 0, torch.float32)
    places, layout = record(model, layout_of(folder)), layout_of(folder)
    places.check(model, layout)
    with pytest.raises(UnfitError, match="other tensors"):
        places.check(model, layout | {"norm": ((HIDDEN,), "F32")})
    model.norm.data = model.norm.data.clone()
    with pytest.raises(UnfitError, match="moved"):
        places.check(model, layout)


class Fp8LinearMethod:
    """Of a quantised layer."""


def test_a_quantised_model_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    check_model(model)
    model[0].quant_method = Fp8LinearMethod()
    with pytest.raises(UnfitError, match="layers of Fp8LinearMethod hold other values"):
        check_model(model)


# ---- real servers


@pytest.mark.sglang
async def test_a_server_without_the_plugin_loads_whole_versions_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    first = make_model(tmp_path / "v1", seed=1)
    second = nudged(first, tmp_path / "v2")
    file = write_changes(first, second, tmp_path / "changes", base=1, version=2)
    async with SGLangServer(make_spec(first, tmp_path)) as server, client(server) as engine:
        await engine.load_weights(first, 1)
        assert not engine.takes_changes
        with pytest.raises(RefusedError, match="the server takes no changes; load the whole version"):
            await engine.check_changes([file], 2)
        assert (await collect(engine, make_request())).versions == [1] * 20
        await engine.load_weights(second, 2)
        response = await collect(engine, make_request())
    exact = laws.full_forward(second, [3, 4, 5, *response.ids], prompt=3)
    assert response.logprobs == pytest.approx(exact, abs=1e-4)


def is_scheduler(process):
    return "scheduler" in " ".join(process.cmdline())


@pytest.mark.sglang
async def test_a_server_that_is_killed_amid_changes_comes_back_by_the_whole_version(tmp_path):
    first = make_model(tmp_path / "v1", seed=1)
    second = nudged(first, tmp_path / "v2", share=0.5)
    file = write_changes(first, second, tmp_path / "changes", base=1, version=2)
    async with SGLangServer(make_spec(first, tmp_path)) as server, client(server) as engine:
        await engine.load_weights(first, 1)
        await load_changes(engine, [file], 2)
        expected = await engine.checksum()
        await engine.load_weights(first, 2)
        again = write_changes(first, second, tmp_path / "again", base=2, version=3)
        await engine.pause(PauseMode.IN_PLACE)
        schedulers = [one for one in psutil.Process(server.pid).children(recursive=True) if is_scheduler(one)]
        assert schedulers
        for process in schedulers:
            process.suspend()  # or the changes might be in before the kill
        changes = await engine.check_changes([again], 3)
        loading = asyncio.create_task(engine.load_changes(changes))
        await asyncio.sleep(0.5)
        for process in schedulers:
            process.kill()
        with pytest.raises(EngineLostError):
            await loading
    async with SGLangServer(make_spec(first, tmp_path)) as server, client(server) as engine:
        await engine.load_weights(second, 3)
        assert await engine.checksum() == expected
