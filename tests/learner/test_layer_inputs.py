"""Inputs of layers that wait on the host: where they are at each moment, and that copies are awaited."""

import weakref
from pathlib import Path

import pytest
import torch

from laminar_py.config.learner import Recompute
from laminar_py.learner.layer_inputs import InputOffloader
from laminar_py.learner.model import policy_logprobs
from tests.learner.builders import SETTINGS, make_learner, make_sequences, pack

LAYERS = 2


@pytest.fixture
def batch():
    return pack(make_sequences(), num_total=6)


def gradients(learner, batch) -> list[torch.Tensor]:
    policy_logprobs(learner.model, batch)[0].sum().backward()
    found = [parameter.grad for parameter in learner.model.parameters()]
    learner.model.zero_grad()
    return found


def offloading(model_folder: Path):
    return make_learner(model_folder, settings=SETTINGS.model_copy(update={"recompute": Recompute.ALL_OFFLOADED}))


def test_inputs_leave_the_device_and_come_back_one_layer_ahead(monkeypatch, model_folder: Path, batch):
    learner = offloading(model_folder)
    saved, entered, seen = [], [], []
    save, restore = InputOffloader._save, InputOffloader._restore

    def saving(self, hidden, *, is_first):
        saved.append(save(self, hidden, is_first=is_first))
        return saved[-1]

    def restoring(self, one):
        found = restore(self, one)
        if one in saved:
            seen.append([each.on_device is not None for each in saved])
        return found

    monkeypatch.setattr(InputOffloader, "_save", saving)
    monkeypatch.setattr(InputOffloader, "_restore", restoring)
    for layer in learner.model.base_model.layers:
        layer.register_forward_pre_hook(lambda _, given: entered.append(weakref.ref(given[0])))
    with torch.no_grad():
        policy_logprobs(learner.model, batch)
    assert not saved, "a pass without a backward pass keeps nothing"
    logprobs, _ = policy_logprobs(learner.model, batch)
    assert len(saved) == LAYERS
    assert [each.on_device is not None for each in saved] == [False, True], "the last one is needed first"
    assert [ref() for ref in entered] == [None] * (2 * LAYERS), "nothing else holds an input"
    logprobs.sum().backward()
    assert seen == [[True, False], [False, False]]


class LateCopies:
    """Copies that are made when somebody waits for them, or as late as a GPU may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        self.made = 0
        monkeypatch.setattr(InputOffloader, "_copy", lambda _, source, target: self.start(source, target))
        monkeypatch.setattr(InputOffloader, "_await_copies", lambda _: self.end())

    def start(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.fill_(torch.nan)
        self.waiting.append((weakref.ref(source), target))

    def end(self) -> None:
        for source, target in self.waiting:
            tensor = source()
            assert tensor is not None, "its memory was given away before the copy"
            target.copy_(tensor)
        self.made += len(self.waiting)
        self.waiting.clear()


def test_no_copy_is_used_before_it_is_made_and_no_source_freed(monkeypatch, model_folder: Path, batch):
    copies = LateCopies(monkeypatch)
    learner = offloading(model_folder)
    expected = gradients(make_learner(model_folder), batch)
    for _ in range(2):  # microbatches
        found = gradients(learner, batch)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert copies.made == 2 * (LAYERS + LAYERS - 1), "all to the host, and all but the last of a pass back"
