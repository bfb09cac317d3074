"""A rank of the learner: it reads the tokens of a step by reference, and steps on nothing else."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from laminar_py.config.algorithm import Aggregation
from laminar_py.config.loading import load_config
from laminar_py.learner.distributed import leave_group
from laminar_py.learner.packing.packer import Packed, pack
from laminar_py.learner.step import Learner
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.writer import SEGMENT, SegmentWriter
from laminar_py.records.codec import decode, encode
from laminar_py.records.spans import Span
from laminar_py.runtime.workers.processes.learner import LearnerActor
from laminar_py.runtime.workers.specs import FetchRequest, LearnerSpec, StepOutcome, StepRequest
from tests.builders import make_trajectory
from tests.learner.builders import full_parameters
from tests.runs.runs import REPO
from tests.stored import store


@pytest.fixture
def rank(model_folder, tmp_path):
    """One that is alone, with the segments in `tmp_path`."""
    config = load_config(REPO / "configs/quickstart.yaml", [f"model.path={model_folder}", "warm_start=null"])
    spec = LearnerSpec(
        config=config.model_dump_json(),
        run_dir=str(tmp_path),
        rank=0,
        rendezvous=str(tmp_path / "rendezvous"),
        store=str(tmp_path / "store"),
        chunk_bytes=4096,
        ranks_here=1,
    )
    try:
        part = LearnerActor()
        part.load(config, spec, PayloadReader(tmp_path))
        part.config = config
        yield part
    finally:
        leave_group()


def items():
    return [make_trajectory(f"g{i % 2}.{i}", response=5 + 7 * i, seed=i, advantage=i - 2) for i in range(6)]


def stored(folder, given):
    """The same by reference, each in a segment of its own."""
    return [
        store(item, SegmentWriter(folder, f"replica-{place}-1-0"), cuts=[2]) for place, item in enumerate(given)
    ]


def packed(given):
    return pack(given, max_tokens=64, ranks=1, aggregation=Aggregation.TOKEN_MEAN, attention_share=0.01)


def fetch(part, step):
    """As its process has the request."""
    return part.fetch(decode(FetchRequest, encode(FetchRequest(step.bundles[0]))))


def take(part, terms, version=None):
    """A step, as its process has the request and gives the answer."""
    outcome = part.step(decode(StepRequest, encode(StepRequest(terms, version))))
    return decode(StepOutcome, encode(outcome))


def alone(part):
    """A learner with the same settings, which is given tokens."""
    config = part.config
    return Learner(
        config.model,
        config.learner,
        config.algorithm,
        temperature=config.rollout.sampling.temperature,
        seed=config.seed,
        total_steps=config.steps,
    )


def test_a_step_on_what_was_fetched_is_that_on_trajectories_with_their_tokens(rank, tmp_path):
    given = items()
    step, plain = packed(stored(tmp_path, given)), packed(given)
    assert len(step.bundles[0]) > 1
    other = alone(rank)
    expected = other.step(plain.microbatches(0))
    assert fetch(rank, step) == {}
    outcome = take(rank, step.weights)
    assert (outcome.version, outcome.stall_s) == (None, 0.0)
    assert (outcome.metrics.loss, outcome.metrics.grad_norm) == (expected.loss, expected.grad_norm)
    for name, tensor in full_parameters(other).items():
        assert torch.equal(full_parameters(rank._learner)[name], tensor), name


def test_a_tree_that_fits_no_microbatch_is_learned_in_parts(rank, tmp_path):
    """Four ends of 20 tokens behind 23 that they share: 103 tokens, and a row has 64."""
    ends = [Span(0, start, start + 20, follows=20) for start in (40, 60, 80)]
    long = replace(make_trajectory("g0.6", response=100, advantage=1.5), spans=(Span(0, 0, 40), *ends))
    given = [*items(), long]
    step, plain = packed(stored(tmp_path, given)), packed(given)
    assert sum(item.id == long.id for bundle in step.bundles[0] for item in bundle) == 2
    assert step.weights.num_trajectories == len(given)
    learner = alone(rank)
    expected = learner.step(Packed([[[item] for item in given]], plain.weights).microbatches(0))
    assert fetch(rank, step) == {}
    metrics = take(rank, step.weights).metrics
    assert metrics.loss == pytest.approx(expected.loss, rel=1e-5)
    assert metrics.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert (metrics.proof.ids, metrics.proof.tokens) == (expected.proof.ids, expected.proof.tokens)


def test_what_is_lost_is_told_by_trajectory_and_the_step_changes_nothing_until_it_is_asked_for(rank, tmp_path):
    step = packed(stored(tmp_path, items()))
    before = full_parameters(rank._learner)
    for place in (1, 4):
        next(tmp_path.glob(f"replica-{place}*{SEGMENT}")).unlink()
    lost = fetch(rank, step)
    assert sorted(lost) == ["g0.4", "g1.1"]
    assert all("No such file" in why for why in lost.values())
    after = full_parameters(rank._learner)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_after_a_loss_the_next_fetch_is_all_that_is_learned_of(rank, tmp_path):
    """A batch that lost some is put back, and comes again without them."""
    given = items()
    finished = stored(tmp_path, given)
    next(tmp_path.glob(f"replica-0-*{SEGMENT}")).unlink()
    assert list(fetch(rank, packed(finished))) == ["g0.0"]
    again, plain = packed(finished[1:]), packed(given[1:])
    assert fetch(rank, again) == {}
    expected = alone(rank).step(plain.microbatches(0))
    metrics = take(rank, again.weights).metrics
    assert (metrics.loss, metrics.grad_norm) == (expected.loss, expected.grad_norm)
    assert metrics.work.num_tokens == sum(item.num_tokens for item in given[1:])


def test_a_step_is_published_as_its_version_if_that_is_asked_for(rank, tmp_path):
    step = packed(stored(tmp_path, items()))
    assert fetch(rank, step) == {}
    assert take(rank, step.weights, version=1).version == 1
    assert rank.completed(1).version == 1


def test_masked_trajectories_take_part_and_teach_nothing(rank, tmp_path):
    finished = stored(tmp_path, items())
    masked = [replace(one, num_trained=0) for one in finished]
    bundles = packed(finished).bundles[0]
    by_id = {one.id: one for one in masked}
    step = Packed([[[by_id[one.id] for one in bundle] for bundle in bundles]], packed(masked).weights)
    assert fetch(rank, step) == {}
    metrics = take(rank, step.weights).metrics
    assert np.isnan([metrics.loss, metrics.grad_norm]).all()


@pytest.mark.parametrize("shares", [True, False])
def test_a_rank_that_shares_its_gpu_gives_unused_memory_back_after_each_call(rank, tmp_path, monkeypatch, shares):
    given = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(rank.position().activity))
    rank._shares_gpus = shares
    step = packed(stored(tmp_path, items()))
    fetch(rank, step)
    take(rank, step.weights, version=1)
    rank.publish(2)
    rank.save(str(tmp_path / "checkpoint"))
    assert rank.saved() == ""
    assert given == ["idle"] * (3 if shares else 0)
