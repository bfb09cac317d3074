"""Silent failures, each planted by a patch of one module at run time, and the alarm that must name it.

A plant is called with its module after the import, in every process of the run. Patches are what such mistakes
are: a copy that does not happen, a wrong factor, a value that hides a failure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

ENGINE = "laminar_py.engines.local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """A failure, e.g. `Plant(of=("a.b",), patch=no_copy, check="weights", failure="...")`."""

    failure: str  # as it happened
    of: tuple[str, ...]  # modules that are patched
    patch: Callable[[ModuleType], None]
    check: str  # alarm that must name it
    settings: Sequence[str] = ()
    within: int = 1  # steps
    resumes: bool = False  # the failure needs a resume

    def __call__(self, module: ModuleType) -> None:
        """Patch a module."""
        self.patch(module)


ALL: dict[str, Plant] = {}


def plant(name: str, of: str | tuple[str, ...], check: str, failure: str, **options):
    """Register a patch under a name."""

    def add(patch: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        modules = (of,) if isinstance(of, str) else of
        ALL[name] = Plant(failure=failure, of=modules, patch=patch, check=check, **options)
        return patch

    return add


# ---- weights


@plant("engine_keeps_tensors", f"{ENGINE}.weights", "weights", "every weight sync succeeds, the tensors stay")
def _(module: ModuleType) -> None:
    module.Weights.copy_ = lambda self, other: None


@plant("one_tensor_stays", f"{ENGINE}.weights", "weights", "one tensor of an engine stays old")
def _(module: ModuleType) -> None:
    copy = module.Weights.copy_

    def copy_all_but_one(self, other):
        old = self.layers[0].down.clone()
        copy(self, other)
        self.layers[0].down.copy_(old)

    module.Weights.copy_ = copy_all_but_one


LORA = ("learner.lora.rank=4", "learner.lora.targets=[q_proj,v_proj]")


@plant("adapter_stays", f"{ENGINE}.adapter", "weights", "an adapter never reaches the engine", settings=LORA)
def _(module: ModuleType) -> None:
    module.AdapterBase.merge = lambda self, adapter, weights: None


@plant("prefix_cache_is_old", f"{ENGINE}.model", "probes", "prefix cache of older weights is reused")
def _(module: ModuleType) -> None:
    prefill = module.LocalModel.prefill

    def prefill_with_first(self, ids, positions, *, attention):
        from copy import deepcopy

        if not hasattr(self, "_first"):
            self._first = deepcopy(self._weights)
        now, self._weights = self._weights, self._first
        try:
            prefill(self, ids, positions, attention=attention)
        finally:
            self._weights = now

    module.LocalModel.prefill = prefill_with_first


@plant("publishes_first_weights", "laminar_py.learner.step", "weights", "the learner publishes what it began with")
def _(module: ModuleType) -> None:
    tensors = module.Learner.named_tensors

    def first_tensors(self, *, dtype):
        if not hasattr(self, "_first_tensors"):
            self._first_tensors = [(name, tensor.clone()) for name, tensor in tensors(self, dtype=dtype)]
        return iter(self._first_tensors)

    module.Learner.named_tensors = first_tensors


@plant("publishes_one_old_tensor", "laminar_py.learner.step", "probes", "one published tensor stays old", within=5)
def _(module: ModuleType) -> None:
    tensors = module.Learner.named_tensors

    def with_old(self, *, dtype):
        for name, tensor in tensors(self, dtype=dtype):
            if name.endswith("layers.0.mlp.down_proj.weight"):
                self._old = getattr(self, "_old", tensor.clone())
                tensor = self._old
            yield name, tensor

    module.Learner.named_tensors = with_old


# ---- engine and learner


@plant("other_rope", f"{ENGINE}.spec", "probes", "engine and learner compute different models (rope)")
def _(module: ModuleType) -> None:
    read = module.ModelSpec.read

    def other(folder):
        spec = read(folder)
        return replace(spec, rope_theta=spec.rope_theta * 4)

    module.ModelSpec.read = staticmethod(other)


@plant(
    "colder",
    f"{ENGINE}.sampling",
    "sampling",
    "the server's temperature differs, its log-probabilities do not",
    within=20,
)
def _(module: ModuleType) -> None:
    draw = module.Sampler.draw

    def colder(self, logits, uniform, *, recorded):
        drawn = draw(self, logits * 1.4, uniform, recorded=recorded)
        logprobs = logits.log_softmax(-1).gather(1, drawn.ids.long()[:, None])[:, 0]
        return replace(drawn, logprobs=logprobs)

    module.Sampler.draw = colder


@plant(
    "top_k_default", f"{ENGINE}.sampling", "probes", "the server's default top-k cuts the vocabulary", within=20
)
def _(module: ModuleType) -> None:
    draw = module.Sampler.draw

    def cut(self, logits, uniform, *, recorded):
        least = logits.topk(min(5, logits.shape[-1])).values[:, -1:]
        return draw(self, logits.masked_fill(logits < least, -1e9), uniform, recorded=recorded)

    module.Sampler.draw = cut


@plant("one_seed", "laminar_py.control.state", "groups", "all samples of a group have one seed", within=20)
def _(module: ModuleType) -> None:
    seed = module.trajectory_seed
    module.trajectory_seed = lambda run_seed, name: seed(run_seed, name.rpartition(".")[0])


# ---- the learner


@plant(
    "loss_per_microbatch",
    "laminar_py.learner.step",
    "step",
    "the loss is a mean over microbatches",
    settings=["packer.max_tokens=2048"],
)
def _(module: ModuleType) -> None:
    loss = module.policy_loss
    module.policy_loss = lambda inputs, settings: loss(inputs, settings) / 4


@plant("a_microbatch_is_lost", "laminar_py.learner.step", "step", "a microbatch never takes part", within=2)
def _(module: ModuleType) -> None:
    step = module.Learner.step
    module.Learner.step = lambda self, microbatches: step(self, microbatches[1:] or microbatches)


@plant("gradients_of_half", "laminar_py.learner.step", "step", "gradients of some microbatches are dropped")
def _(module: ModuleType) -> None:
    backward = module.Learner._backward

    def forgetful(self, update_, sums, partition, *, at_step_start):
        half = len(update_.batches) // 2
        first = backward(
            self, replace(update_, batches=update_.batches[:half]), sums, partition, at_step_start=at_step_start
        )
        self._optimizer.adamw.zero_grad()  # as a reduction that overwrites would
        rest = replace(update_, batches=update_.batches[half:])
        return first + backward(self, rest, sums, partition, at_step_start=at_step_start)

    module.Learner._backward = forgetful


@plant(
    "tokens_are_truncated",
    "laminar_py.learner.packing.packer",
    "step",
    "the learner truncates responses",
    within=2,
)
def _(module: ModuleType) -> None:
    weights = module.StepWeights.token_weights

    def shorter(self, trajectory):
        out = weights(self, trajectory).copy()
        out[40:] = 0
        return out

    module.StepWeights.token_weights = shorter


@plant(
    "half_not_in_optimizer",
    "laminar_py.learner.step",
    "optimizer",
    "parameters are not in the optimizer",
    within=4,
)
def _(module: ModuleType) -> None:
    build = module.Optimizer.__init__

    def half(self, model, settings, *, total_steps=None):
        build(self, model, settings, total_steps=total_steps)
        for group in self.adamw.param_groups:
            group["params"] = group["params"][::2]

    module.Optimizer.__init__ = half


@plant(
    "updates_are_rounded_away",
    "laminar_py.learner.step",
    "weights",
    "updates are smaller than bf16 can hold",
    within=4,
    settings=["learner.lr=1e-6"],
)
def _(module: ModuleType) -> None:
    import torch

    update = module.Optimizer.update

    def rounded(self, step, *, loss):
        with torch.no_grad():
            for parameter in self._trained:
                parameter.copy_(parameter.bfloat16())
            old = [parameter.clone() for parameter in self._trained]
            norm = update(self, step, loss=loss)
            for parameter, before in zip(self._trained, old, strict=True):
                parameter.copy_((before.bfloat16() + (parameter - before).bfloat16()).float())
        return norm

    module.Optimizer.update = rounded


@plant(
    "nan_is_hidden",
    "laminar_py.learner.losses.loss",
    "step",
    "numbers that are not finite are masked away",
    within=2,
)
def _(module: ModuleType) -> None:
    import torch

    make = module.make_loss_inputs

    def masked(batch, rows, *arguments, **options):
        batch.behaviour_logprobs[::97] = float("nan")
        inputs = make(batch, rows, *arguments, **options)
        return replace(
            inputs, behaviour=torch.nan_to_num(inputs.behaviour), proximal=torch.nan_to_num(inputs.proximal)
        )

    module.make_loss_inputs = masked


@plant(
    "reference_follows",
    "laminar_py.learner.reference",
    "reference",
    "the reference model follows the policy",
    within=3,
    settings=["algorithm.kl_coef=0.01", "algorithm.reference_pass=learner"],
)
def _(module: ModuleType) -> None:
    import torch

    open_reference = module.open_reference

    def follows(policy, *arguments, **options):
        reference = open_reference(policy, *arguments, **options)
        add = reference.add_logprobs

        def copied(batches):
            with torch.no_grad():
                for mine, theirs in zip(reference.model.parameters(), policy.parameters(), strict=True):
                    mine.copy_(theirs)
            return add(batches)

        reference.add_logprobs = copied
        return reference

    module.open_reference = follows


# ---- data


@plant(
    "failures_are_zeros",
    "laminar_py.reward.scorer",
    "scores",
    "failed rewards count as zeros",
    settings=["reward.use=[experiments/silent/rewards.py:flaky]"],
)
def _(module: ModuleType) -> None:
    add_up = module.add_up

    def kind(trajectory_id, outcomes, **options):
        import msgspec

        zeros = [
            (term, msgspec.structs.replace(outcome, failure=None, value=outcome.value or 0.0))
            for term, outcome in outcomes
        ]
        return add_up(trajectory_id, zeros, **options)

    module.add_up = kind


@plant("part_groups", "laminar_py.control.consumption", "scores", "part batches count as whole", within=2)
def _(module: ModuleType) -> None:
    put = module.Consumption.put

    async def put_half(self, group):
        members = list(group.members.items())
        half = replace(group, members=dict(members[: len(members) // 2]))
        await put(self, half)

    module.Consumption.put = put_half


@plant(
    "long_ones_go_stale",
    "laminar_py.control.consumption",
    "coverage",
    "stale drops starve long answers",
    within=20,
)
def _(module: ModuleType) -> None:
    drop_stale = module.Consumption._drop_stale

    def starving(self, count):
        drop_stale(self, count)
        from laminar_py.records.trajectory import DropReason

        self._drop_members(DropReason.STALE, lambda member: "old" if member.length > 60 else None, most=count)

    module.Consumption._drop_stale = starving


@plant(
    "constant_reward",
    (),
    "rewards",
    "the reward is constant",
    within=20,
    settings=["reward.use=[experiments/silent/rewards.py:constant]", "rollout.without_signal=train"],
)
def _(module: ModuleType) -> None:
    """The settings are the failure."""


@plant(
    "reward_is_length",
    (),
    "rewards",
    "the reward rises with length alone",
    within=20,
    settings=["reward.use=[experiments/silent/rewards.py:length]"],
)
def _(module: ModuleType) -> None:
    """The settings are the failure."""


@plant(
    "evaluates_on_training_data",
    "laminar_py.data.problems",
    "evaluation",
    "evaluation on training data",
    within=20,
    settings=["eval.sets.heldout.path=experiments/quickstart/data/train.jsonl"],
)
def _(module: ModuleType) -> None:
    module.check_disjoint = lambda heldout, train: None


@plant(
    "evaluates_other_weights",
    "laminar_py.runtime.orchestrator.evaluator",
    "evaluation",
    "an evaluation says other weights",
    settings=["eval.every_steps=2"],
    within=4,
)
def _(module: ModuleType) -> None:
    evaluated = module.Evaluated
    module.Evaluated = lambda **fields: evaluated(**fields | {"version": fields["version"] + (fields["step"] > 0)})
