"""PPO with a critic against an independent reference in fp64; over ranks, checkpoints, adapters and trees."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.critic import Action, CriticConfig
from laminar_py.config.learner import LoraConfig, Recompute
from laminar_py.config.section import ConfigError
from laminar_py.learner.critic import Critic
from laminar_py.learner.distributed import join_group, leave_group
from laminar_py.learner.export import export_checkpoint
from laminar_py.learner.packing import layout
from laminar_py.learner.packing.balance import fit_bins
from laminar_py.learner.packing.packer import deal_to_ranks, microbatch, step_weights
from laminar_py.records.columns import TOKEN_REWARDS, VALUE_TARGETS, VALUES, token_values
from laminar_py.records.credit import RoleCredit
from laminar_py.records.spans import NEW_CONVERSATION, Span, sampled_mask, turn_ends
from tests.builders import make_trajectory
from tests.learner.builders import SETTINGS, assert_near, full_parameters, make_learner
from tests.learner.losses.test_value import expected
from tests.learner.ranks import run_ranks
from tests.packing.test_layout import BACK_TO_FIRST, group, tree

FREE = SETTINGS.model_copy(update={"grad_clip": 1e9})
SLOW = SETTINGS.model_copy(update={"lr": 1e-4})


def ppo(updates=1, **critic):
    return AlgorithmConfig(name="ppo", updates_per_step=updates, critic=CriticConfig(**{"lr": 3e-2} | critic))


def two_turns(item, *, first, answer):
    """The first tokens are a turn, the next an environment's answer, the rest a second turn."""
    length = len(item.response_ids)
    spans = (Span(0, 0, first), Span(None, first, first + answer), Span(0, first + answer, length))
    return replace(item, spans=spans, loss_mask=sampled_mask(spans, length))


def with_token_rewards(item, seed):
    rewards = np.random.default_rng(seed).integers(-2, 3, len(item.response_ids)).astype(np.float32)
    return replace(item, advantage=float(rewards.sum()), columns={TOKEN_REWARDS: token_values(rewards)})


def game(item):
    """Three turns of two roles, each in a context of its own, which an environment's token begins."""
    spans = [
        span
        for place in (0, 4, 8)
        for span in (Span(None, place, place + 1, follows=NEW_CONVERSATION), Span(0, place + 1, place + 4))
    ]
    roles = (
        RoleCredit(role="black", reward=1.0, turns=(1, 3), advantage=1.0),
        RoleCredit(role="white", reward=-0.5, turns=(2,), advantage=-0.5),
    )
    return replace(item, spans=tuple(spans), loss_mask=sampled_mask(spans, 12), roles=roles)


def samples():
    """Five responses: plain, of two turns, with process rewards, cut by a cap, of two roles."""
    made = [
        make_trajectory(f"g{k}.0", prompt=3 + k, response=length, seed=k, advantage=reward, reward=reward)
        for k, (length, reward) in enumerate([(9, 1.0), (14, 0.0), (11, 1.0), (16, 1.0), (12, 0.5)])
    ]
    near = [replace(item, logprobs=item.logprobs - np.float32(3.6)) for item in made]  # as of a random model
    plain, turns, rewarded, cut, played = near
    return [
        plain,
        two_turns(turns, first=5, answer=3),
        two_turns(with_token_rewards(rewarded, 3), first=4, answer=2),
        two_turns(replace(cut, finish_reason="length"), first=6, answer=1),
        game(played),
    ]


def packed(items, algorithm, *, ranks=1, max_tokens=40):
    bins = fit_bins(items, max_tokens=max_tokens)
    terms = step_weights(bins, aggregation=algorithm.aggregation, columns=algorithm.packed_columns)
    return deal_to_ranks(bins, terms, max_tokens=max_tokens, ranks=ranks, attention_share=0.0)


# ---- the reference: one sequence at a time, transformers' own forward in fp64, sums as they are defined


def chains_of(item):
    """Turns of each actor, each a list of (place, reward); an environment's reward counts for the token before."""
    rewards = np.zeros(len(item.response_ids))
    sampled = np.flatnonzero(item.loss_mask)
    if item.columns:
        for place, reward in enumerate(item.columns[TOKEN_REWARDS].array):
            rewards[sampled[sampled <= place].max()] += reward
    elif not item.roles:
        rewards[sampled[-1]] = item.advantage
    starts = [0, *turn_ends(item.spans)]
    turns = [sampled[(sampled >= a) & (sampled < b)] for a, b in pairwise(starts)]
    chains = [[turns[turn - 1] for turn in credit.turns] for credit in item.roles] or [turns]
    for credit, chain in zip(item.roles, chains, strict=False):
        rewards[chain[-1][-1]] = credit.reward
    return [[[(place, rewards[place]) for place in turn] for turn in chain] for chain in chains]


@dataclass
class Reference:
    """Policy and critic in fp64."""

    policy: torch.nn.Module
    critic: torch.nn.Module
    head: torch.nn.Parameter

    def tokens(self, item):
        """Log-probability and value of each sampled token of a response, by its place."""
        logprobs, values = {}, {}
        for path in item.token_paths:
            prompt = item.prompt_ids if path.has_prompt else item.prompt_ids[:0]
            ids = torch.tensor(np.concatenate([prompt, item.response_ids[path.places]])).long()[None]
            hidden = self.critic.model(ids).last_hidden_state[0]
            logits = self.policy(ids).logits[0].log_softmax(-1)
            for index, (place, own) in enumerate(zip(path.places, path.own, strict=True)):
                row = len(prompt) + index - 1
                if own and item.loss_mask[place] and row >= 0:
                    logprobs[place] = logits[row, ids[0, row + 1]]
                    values[place] = hidden[row] @ self.head[0]
        return logprobs, values

    def credit(self, items, given):
        """Values, whitened advantages and targets of all sampled tokens, by (item, place)."""
        values, advantages, targets = {}, {}, {}
        for number, item in enumerate(items):
            of_item = {place: value.item() for place, value in self.tokens(item)[1].items()}
            values |= {(number, place): value for place, value in of_item.items()}
            for chain in chains_of(item):
                turns = [[(reward, of_item[place]) for place, reward in turn] for turn in chain]
                keys = [(number, place) for turn in chain for place, _ in turn]
                for found, numbers in zip((advantages, targets), expected(turns, given), strict=True):
                    found |= dict(zip(keys, numbers, strict=True))
        every = np.array(list(advantages.values()))
        white = {key: (one - every.mean()) / (every.std() + 1e-4) for key, one in advantages.items()}
        return values, white, targets

    def gradients(self, items, chosen, credit, *, weight, clip):
        """Gradients of both losses over the `chosen` items, by the name of a parameter."""
        at_start, advantages, targets = credit
        losses = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
        for number in chosen:
            for place, logprob in (found := self.tokens(items[number]))[0].items():
                key, value = (number, place), found[1][place]
                ratio = (logprob - float(items[number].logprobs[place])).exp()
                parts = ratio * advantages[key], ratio.clamp(0.8, 1.2) * advantages[key]
                losses[0] = losses[0] - weight * torch.minimum(*parts)
                moved = at_start[key] + (value - at_start[key]).clamp(-clip, clip)
                errors = (value - targets[key]) ** 2, (moved - targets[key]) ** 2
                losses[1] = losses[1] + weight * torch.maximum(*errors) / 2
        for parameter in (*self.policy.parameters(), *self.critic.parameters(), self.head):
            parameter.grad = None
        for loss in losses:
            loss.backward()
        policy = {name: one.grad for name, one in self.policy.named_parameters()}
        critic = {name: one.grad for name, one in self.critic.named_parameters() if name != "lm_head.weight"}
        return policy, critic | {"lm_head.weight": self.head.grad}


def reference_at(folder, policy, critic):
    """At these weights."""
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for _ in range(2)]
    head = torch.nn.Parameter(critic["lm_head.weight"].double())
    for model, weights in zip(models, (policy, critic), strict=True):
        kept = {name: value.double() for name, value in weights.items() if len(value) > 1}
        model.load_state_dict(kept, strict=False)
    return Reference(*models, head)


@dataclass
class Recorded:
    """Weights and gradients of a model before each of its updates."""

    weights: list = field(default_factory=list)
    gradients: list = field(default_factory=list)

    def watch(self, model, adamw):
        def keep(*_):
            self.weights.append({name: one.detach().clone() for name, one in model.named_parameters()})
            self.gradients.append({name: one.grad.clone() for name, one in model.named_parameters()})

        adamw.register_step_pre_hook(keep)
        return self


def seeded(learner):
    """With a head that gives values."""
    head = learner._critic.model.get_output_embeddings().weight
    with torch.no_grad():
        head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(5)) * 0.1)
    return learner


@pytest.mark.parametrize(
    "algorithm",
    [
        ppo(gamma=0.97, policy_lambda=0.9, value_lambda=0.8),
        ppo(action=Action.TURN, policy_lambda=0.5),
        ppo(2, clip=0.02),
    ],
    ids=["tokens", "turns", "two updates, clipped"],
)
def test_gradients_of_policy_and_value_are_the_references(model_folder, algorithm):
    items, learner = samples(), seeded(make_learner(model_folder, settings=FREE, algorithm=algorithm))
    step = packed(items, algorithm)
    policy = Recorded().watch(learner.model, learner._optimizer.adamw)
    critic = Recorded().watch(learner._critic.model, learner._critic.optimizer.adamw)
    metrics = learner.step(step.microbatches(0))
    count = sum(item.num_trained for item in items)
    credit = reference_at(model_folder, policy.weights[0], critic.weights[0]).credit(items, algorithm.critic)
    assert len(credit[0]) == count == metrics.tokens.num_tokens
    updates = algorithm.updates_per_step
    for update in range(updates):
        names = {one.id for bundle in step.bundles[0][update::updates] for one in bundle}
        chosen = [number for number, item in enumerate(items) if item.id in names]
        share = sum(items[number].num_trained for number in chosen) / count
        found = reference_at(model_folder, policy.weights[update], critic.weights[update]).gradients(
            items, chosen, credit, weight=1 / count / share, clip=algorithm.critic.clip
        )
        assert_near(to_double(policy.gradients[update]), found[0], rel=1e-5)
        assert_near(to_double(critic.gradients[update]), found[1], rel=1e-5)
    assert (metrics.critic.clip_fraction > 0) == (updates > 1)
    values, targets = (np.array([one[key] for key in credit[1]]) for one in (credit[0], credit[2]))
    assert metrics.critic.value_mean == pytest.approx(values.mean(), rel=1e-4)
    left = 1 - (targets - values).var() / targets.var()
    assert metrics.critic.explained_variance == pytest.approx(left, rel=1e-4, abs=1e-5)
    assert metrics.tokens.advantage_mean == pytest.approx(0.0, abs=1e-5)
    assert metrics.tokens.advantage_std == pytest.approx(1.0, rel=2e-3)


def to_double(tensors):
    return {name: tensor.double() for name, tensor in tensors.items()}


def test_the_first_values_are_0_and_the_critic_learns_what_is_to_come(model_folder):
    items, algorithm = samples(), ppo()
    learner = make_learner(model_folder, settings=SLOW, algorithm=algorithm)
    figures = [learner.step(packed(items, algorithm).microbatches(0)).critic for _ in range(40)]
    assert figures[0].value_mean == 0.0
    assert figures[0].explained_variance == pytest.approx(0.0, abs=1e-6)
    assert figures[-1].explained_variance > 0.9
    assert figures[-1].value_loss < 0.1 * figures[0].value_loss
    assert figures[-1].value_mean == pytest.approx(figures[-1].target_mean, abs=0.1)


def test_a_group_of_one_and_a_step_without_tokens_are_steps(model_folder):
    algorithm = ppo()
    learner = make_learner(model_folder, algorithm=algorithm)
    assert learner.step(packed(samples()[:1], algorithm).microbatches(0)).grad_norm > 0
    nothing = [replace(item, weight=0.0, loss_mask=item.loss_mask & False) for item in samples()[:1]]
    before = critic_weights(learner)
    metrics = learner.step(packed(nothing, algorithm).microbatches(0))
    assert np.isnan(metrics.loss)
    assert np.isnan(metrics.critic.value_loss)
    assert metrics.critic.skipped == 0
    assert before.keys() == critic_weights(learner).keys()


# ---- trees and shared prompts


def advantages_by_token(learner, items, algorithm):
    """Advantage, value and target of each token, by its response and place."""
    bins = fit_bins(items, max_tokens=400)
    terms = step_weights(bins, aggregation=algorithm.aggregation, columns=algorithm.packed_columns)
    rows = [microbatch(list(one.trajectories), terms) for one in bins]
    found = {}
    for one, batch in zip(bins, learner._critic.assess(rows), strict=True):
        for item, placed in zip(one.trajectories, layout.lay_out(list(one.trajectories)).placed, strict=True):
            numbers = batch.advantages, batch.columns[VALUES], batch.columns[VALUE_TARGETS]
            for row, place in zip(placed.rows, placed.places, strict=True):
                found[item.id, int(place)] = tuple(float(array[row]) for array in numbers)
    return found, sum(batch.num_tokens for batch in rows)


def test_rows_that_several_sequences_share_give_each_token_its_own_advantage(model_folder, monkeypatch):
    algorithm = ppo(policy_lambda=0.8)
    learner = seeded(make_learner(model_folder, algorithm=algorithm))
    trees = [tree(BACK_TO_FIRST, seed=seed) for seed in (0, 1)]
    items = [*trees, *group(3, 25, [9, 14, 6])]
    items = [replace(item, advantage=float(number % 2)) for number, item in enumerate(items)]
    shared, few = advantages_by_token(learner, items, algorithm)
    monkeypatch.setattr(layout, "LEAST_STEM", 10**9)
    alone, many = advantages_by_token(learner, items, algorithm)
    assert few < many
    assert shared.keys() == alone.keys()
    np.testing.assert_allclose(list(shared.values()), [alone[key] for key in shared], rtol=1e-4, atol=1e-5)


# ---- ranks

CASES = {
    "whole": ({"recompute": Recompute.ALL}, ppo(lr=1e-3, policy_lambda=0.9)),
    "adapters": ({"lora": LoraConfig(rank=4, alpha=8.0)}, ppo(lr=1e-3)),
    "context": ({"context_parallel": 2}, ppo(lr=1e-3)),
}
STEPS = 2


def critic_weights(learner):
    """Of the trained tensors, in full."""
    trained = {name: one for name, one in learner._critic.model.named_parameters() if one.requires_grad}
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in trained.items()
    }


def run_case(case, folder, *, mesh=None, rank=0, ranks=1):
    changes, algorithm = CASES[case]
    settings = SLOW.model_copy(update={**changes, "world_size": ranks})
    together = settings.context_parallel if mesh else 1
    if not mesh:
        settings = settings.model_copy(update={"context_parallel": 1})
    learner = make_learner(folder, mesh=mesh, settings=settings, algorithm=algorithm)
    step = packed(samples(), algorithm, ranks=ranks // together)
    metrics = [learner.step(step.microbatches(rank // together)) for _ in range(STEPS)]
    return learner, metrics


def measures(metrics):
    rows = [
        (m.critic.value_loss, m.critic.value_mean, m.critic.target_mean, m.critic.explained_variance, m.grad_norm,
         m.critic.grad_norm, m.tokens.advantage_std, m.work.flops)
        for m in metrics
    ]  # fmt: skip
    return torch.tensor(rows, dtype=torch.float64)


def rank_main(rank, world_size, folder, model_folder):
    torch.set_num_threads(1)
    mesh = join_group(str(folder / "rendezvous"), rank=rank, world_size=world_size)
    for case in CASES:
        learner, metrics = run_case(case, model_folder, mesh=mesh, rank=rank, ranks=world_size)
        assert metrics[-1].proof.astray == ()
        assert all(gap(sums) < 1e-5 for one in metrics for sums in one.proof.gradients)
        assert len(metrics[-1].proof.gradients) == (0 if case == "adapters" else 2), "of policy and critic"
        found = {f"policy.{name}": one for name, one in full_parameters(learner).items()}
        found |= {f"critic.{name}": one for name, one in critic_weights(learner).items()}
        assert learner.save(folder / f"{case}-checkpoint") == ""
        again = make_learner(model_folder, mesh=mesh, settings=learner._settings, algorithm=CASES[case][1])
        assert again.load(folder / f"{case}-checkpoint") == ""
        assert all(torch.equal(one, found[f"critic.{name}"]) for name, one in critic_weights(again).items())
        if rank == 0:
            save_file(found | {"measures": measures(metrics)}, folder / f"{case}.safetensors")
    leave_group()


@pytest.fixture(scope="module")
def two_ranks(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(rank_main, 2, folder, model_folder, world_size=2)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_reach_the_critic_of_one_process(model_folder, two_ranks, case):
    learner, metrics = run_case(case, model_folder)
    found = load_file(two_ranks / f"{case}.safetensors")
    torch.testing.assert_close(found["measures"], measures(metrics), rtol=1e-4, atol=1e-6)
    for name, tensor in critic_weights(learner).items():
        torch.testing.assert_close(found[f"critic.{name}"], tensor, rtol=1e-4, atol=2e-5)
    for name, tensor in full_parameters(learner).items():
        torch.testing.assert_close(found[f"policy.{name}"], tensor, rtol=1e-4, atol=2e-5)


def test_beneath_adapters_a_critic_trains_adapters_and_its_head(model_folder):
    learner, metrics = run_case("adapters", model_folder)
    names = critic_weights(learner)
    assert "lm_head.weight" in names
    assert all(".lora_" in name for name in names if name != "lm_head.weight")
    assert metrics[-1].proof.astray == ()


# ---- checkpoints


def test_a_checkpoint_continues_bit_by_bit_with_its_critic_and_exports_the_policy(model_folder, tmp_path):
    algorithm = ppo(2)
    batches = packed(samples(), algorithm).microbatches(0)
    learner = make_learner(model_folder, algorithm=algorithm)
    for _ in range(2):
        learner.step(batches)
    assert learner.save(tmp_path / "step-2") == ""
    expected_metrics = learner.step(batches)
    resumed = make_learner(model_folder, algorithm=algorithm)
    assert resumed.load(tmp_path / "step-2") == ""
    metrics = resumed.step(batches)
    assert metrics.proof.astray == ()
    assert replace(metrics.critic, elapsed_s=0.0) == replace(expected_metrics.critic, elapsed_s=0.0)
    for of in (full_parameters, critic_weights):
        assert all(torch.equal(one, of(resumed)[name]) for name, one in of(learner).items())
    with pytest.raises(ConfigError, match="has a critic, and this run has none"):
        make_learner(model_folder).load(tmp_path / "step-2")
    make_learner(model_folder).save(tmp_path / "plain")
    with pytest.raises(ConfigError, match="has no critic, and this run has one"):
        resumed.load(tmp_path / "plain")
    export_checkpoint(tmp_path / "step-2", tmp_path / "out", source=model_folder, dtype="float32")


# ---- silent failures


def test_a_critic_that_is_not_in_its_optimizer_is_named(model_folder):
    algorithm = ppo()
    learner = make_learner(model_folder, algorithm=algorithm)
    for one in learner._critic.optimizer.adamw.param_groups:
        one["params"] = []
    proof = learner.step(packed(samples(), algorithm).microbatches(0)).proof
    assert proof.astray == ("critic.lm_head.weight",)


def gap(sums):
    return abs(sums.expected - sums.found) / max(sums.size, 1e-9)


def test_gradients_of_a_critic_that_are_lost_are_found(model_folder, monkeypatch):
    algorithm = ppo()
    learner = seeded(make_learner(model_folder, algorithm=algorithm))
    batches = packed(samples(), algorithm).microbatches(0)
    assert len(batches) > 1
    assert all(gap(sums) < 1e-5 for sums in learner.step(batches).proof.gradients)
    backward = Critic._backward

    def forgetful(self, batch, share):
        self.optimizer.adamw.zero_grad()
        return backward(self, batch, share)

    monkeypatch.setattr(Critic, "_backward", forgetful)
    of_policy, of_critic = learner.step(batches).proof.gradients
    assert gap(of_policy) < 1e-5
    assert abs(of_critic.expected - of_critic.found) > 0.1 * of_critic.spread


def test_values_that_are_not_finite_are_counted_and_change_no_policy(model_folder):
    algorithm = ppo()
    learner = make_learner(model_folder, algorithm=algorithm)
    with torch.no_grad():
        learner._critic.model.get_output_embeddings().weight[0, 0] = torch.nan
    before = full_parameters(learner)
    metrics = learner.step(packed(samples(), algorithm).microbatches(0))
    assert metrics.critic.not_finite == sum(item.num_trained for item in samples())
    assert (metrics.skipped, metrics.critic.skipped) == (1, 1)
    assert np.isnan([metrics.critic.clip_fraction, metrics.critic.learning_rate]).all()
    assert metrics.proof.gradients == ()
    assert all(torch.equal(one, before[name]) for name, one in full_parameters(learner).items())
