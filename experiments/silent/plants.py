"""Silent failures, each planted by a patch of one module at run time, and the alarm that must name it.

A plant is called with its module after the import, in every process of the run. Patches are what such mistakes
are: a copy that does not happen, a wrong factor, a value that hides a failure.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import iscoroutinefunction
from pathlib import Path
from types import ModuleType

from laminar_py.records.proofs import WeightsChecksum

ENGINE = "laminar_py.engines.local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """A failure, e.g. `Plant(of=("a.b",), patch=no_copy, check="weights", failure="...")`."""

    failure: str  # as it happened
    of: tuple[str, ...]  # modules that are patched
    patch: Callable[[ModuleType], None]
    check: str | tuple[str, ...]  # alarm that must name it, or any of several
    settings: Sequence[str] = ()
    within: int = 1  # steps; an engine may skip the first new version, so its weights have two
    resumes: bool = False  # a sound run of two steps comes first, and the failure with its resume

    def __call__(self, module: ModuleType) -> None:
        """Patch a module."""
        self.patch(module)


ALL: dict[str, Plant] = {}


def plant(name: str, of: str | tuple[str, ...], check: str | tuple[str, ...], failure: str, **options):
    """Register a patch under a name."""

    def add(patch: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        modules = (of,) if isinstance(of, str) else of
        ALL[name] = Plant(failure=failure, of=modules, patch=patch, check=check, **options)
        return patch

    return add


# ---- weights


@plant(
    "engine_keeps_tensors",
    f"{ENGINE}.weights",
    "weights",
    "every weight sync succeeds, the tensors stay",
    within=2,
)
def _(module: ModuleType) -> None:
    module.Weights.copy_ = lambda self, other: None


@plant("one_tensor_stays", f"{ENGINE}.weights", "weights", "one tensor of an engine stays old", within=2)
def _(module: ModuleType) -> None:
    copy = module.Weights.copy_

    def copy_all_but_one(self, other):
        old = self.layers[0].down.clone()
        copy(self, other)
        self.layers[0].down.copy_(old)

    module.Weights.copy_ = copy_all_but_one


LORA = ("learner.lora.rank=4", "learner.lora.targets=[q_proj,v_proj]")


@plant(
    "adapter_stays", f"{ENGINE}.adapter", "weights", "an adapter never reaches the engine", settings=LORA, within=2
)
def _(module: ModuleType) -> None:
    module.AdapterBase.merge = lambda self, adapter, weights: None


@plant("prefix_cache_is_old", f"{ENGINE}.model", "probes", "prefix cache of older weights is reused", within=2)
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


@plant("publishes_first_weights", "laminar_py.learner.step", "weights", "the learner publishes its first weights")
def _(module: ModuleType) -> None:
    sources = module.Learner.sources

    def first_sources(self, *, dtype, gather):
        if not hasattr(self, "_first"):
            tensors = module.full_tensors(sources(self, dtype=dtype, gather=gather))
            self._first = [module.TensorSource.whole(name, tensor.clone()) for name, tensor in tensors]
        return self._first

    module.Learner.sources = first_sources


@plant("publishes_one_old_tensor", "laminar_py.learner.step", "probes", "one published tensor stays old", within=5)
def _(module: ModuleType) -> None:
    sources = module.Learner.sources

    def with_old(self, *, dtype, gather):
        found = sources(self, dtype=dtype, gather=gather)
        for index, source in enumerate(found):
            if source.stored[0].name.endswith("layers.0.mlp.down_proj.weight"):
                if not hasattr(self, "_old"):
                    self._old = [(name, first, rows.clone()) for name, first, rows in source.read()]
                found[index] = module.TensorSource(source.stored, lambda: self._old)
        return found

    module.Learner.sources = with_old


# ---- engine and learner


@plant("other_rope", f"{ENGINE}.spec", "probes", "engine and learner compute different models (rope)")
def _(module: ModuleType) -> None:
    read = module.ModelSpec.read

    def other(folder):
        spec = read(folder)
        return replace(spec, rope_theta=spec.rope_theta * 4)

    module.ModelSpec.read = staticmethod(other)


def sample_sharper(module: ModuleType, factor: float) -> None:
    """Sample from logits times a factor, and record the log-probabilities of those without it."""
    draw = module.Sampler.draw

    def other(self, logits, uniform, **options):
        drawn = draw(self, logits * factor, uniform, **options)
        return replace(drawn, logprobs=logits.log_softmax(-1).gather(1, drawn.ids.long()[:, None])[:, 0])

    module.Sampler.draw = other


@plant(
    "colder",
    f"{ENGINE}.sampling",
    "sampling",
    "the server's temperature differs, its log-probabilities do not",
    within=20,
)
def _(module: ModuleType) -> None:
    sample_sharper(module, 1.4)


@plant(
    "top_k_default", f"{ENGINE}.sampling", "probes", "the server's default top-k cuts the vocabulary", within=20
)
def _(module: ModuleType) -> None:
    draw = module.Sampler.draw

    def cut(self, logits, uniform, **options):
        least = logits.topk(min(5, logits.shape[-1])).values[:, -1:]
        return draw(self, logits.masked_fill(logits < least, -1e9), uniform, **options)

    module.Sampler.draw = cut


@plant("one_seed", "laminar_py.control.state", "groups", "all samples of a group have one seed", within=20)
def _(module: ModuleType) -> None:
    seed = module.trajectory_seed
    module.trajectory_seed = lambda run_seed, name: seed(run_seed, name.rpartition(".")[0])


@plant(
    "hotter",
    f"{ENGINE}.sampling",
    "sampling",
    "the server's temperature is higher, its log-probabilities are not",
    within=20,
)
def _(module: ModuleType) -> None:
    sample_sharper(module, 1 / 1.5)


@plant(
    "engine_is_a_version_late",
    f"{ENGINE}.scheduler",
    ("weights", "probes"),
    "the version before is served",
    within=2,
)
def _(module: ModuleType) -> None:
    load = module.Scheduler.load_weights

    def load_before(self, folder, version):
        before, self._folder = getattr(self, "_folder", folder), folder
        load(self, before, version)

    module.Scheduler.load_weights = load_before


@plant("prompts_are_truncated", f"{ENGINE}.scheduler", "probes", "the engine truncates prompts")
def _(module: ModuleType) -> None:
    make = module.Scheduler._make_job

    def truncated(self, ticket, request):
        import msgspec

        return make(self, ticket, msgspec.structs.replace(request, prompt_ids=request.prompt_ids[-4:]))

    module.Scheduler._make_job = truncated


# ---- the learner


@plant("rows_see_each_other", "laminar_py.learner.step", "probes", "packed responses attend to each other")
def _(module: ModuleType) -> None:
    logprobs = module.policy_logprobs

    def joined(model, batch, rows):
        import msgspec

        return logprobs(model, msgspec.structs.replace(batch, cu_seqlens=batch.cu_seqlens[[0, -1]]), rows)

    module.policy_logprobs = joined


@plant("learner_has_dropout", "laminar_py.learner.trained", "probes", "dropout is on in the learner")
def _(module: ModuleType) -> None:
    import torch

    load = module.load_policy

    def dropping(*arguments, **options):
        model = load(*arguments, **options)
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(lambda _, __, out: torch.nn.functional.dropout(out, 0.1))
        return model

    module.load_policy = dropping


@plant(
    "behaviour_is_recomputed",
    "laminar_py.learner.step",
    "step",
    "the learner's log-probabilities replace the engine's",
)
def _(module: ModuleType) -> None:
    logprobs, step = module.policy_logprobs, module.Learner.step

    def recomputed(self, microbatches):
        import torch

        for batch in microbatches:
            rows = module.trained_rows(batch, torch.device("cpu"))
            with torch.no_grad():
                batch.behaviour_logprobs[rows.numpy()] = logprobs(self.model, batch, rows)[0].numpy()
        return step(self, microbatches)

    module.Learner.step = recomputed


@plant("loss_has_the_wrong_sign", "laminar_py.learner.step", "step", "the loss has the wrong sign")
def _(module: ModuleType) -> None:
    loss = module.policy_loss
    module.policy_loss = lambda inputs, settings: -loss(inputs, settings)


@plant("optimizer_ascends", "laminar_py.learner.step", "optimizer", "updates follow the gradient uphill", within=2)
def _(module: ModuleType) -> None:
    build = module.Optimizer.__init__

    def ascending(self, model, settings, *, total_steps=None):
        build(self, model, settings, total_steps=total_steps)
        for group in self.adamw.param_groups:
            group["maximize"] = True

    module.Optimizer.__init__ = ascending


@plant("advantages_are_lost", "laminar_py.learner.packing.packer", "step", "the packer mixes up advantages")
def _(module: ModuleType) -> None:
    advantages = module.StepWeights.advantages
    module.StepWeights.advantages = lambda self, trajectory: abs(advantages(self, trajectory))


TWO_RANKS = ("learner.world_size=2", "packer.max_tokens=2048")


@plant(
    "gradients_of_a_rank_are_missing",
    "laminar_py.learner.step",
    "step",
    "ranks do not reduce their gradients",
    settings=TWO_RANKS,
)
def _(module: ModuleType) -> None:
    backward = module.Learner._backward

    def lost(self, update_, sums, partition, *, at_step_start):
        loss = backward(self, update_, sums, partition, at_step_start=at_step_start)
        if self.ranks.mesh.get_rank() == 1:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.to_local().zero_()
        return loss

    module.Learner._backward = lost


@plant(
    "a_rank_has_anothers_batch",
    "laminar_py.learner.packing.packer",
    "step",
    "a rank trains on another's batch",
    settings=TWO_RANKS,
)
def _(module: ModuleType) -> None:
    deal = module.deal_to_ranks

    def first_to_all(*arguments, **options):
        packed = deal(*arguments, **options)
        return replace(packed, bundles=[packed.bundles[0] for _ in packed.bundles])

    module.deal_to_ranks = first_to_all


@plant(
    "half_not_in_optimizer",
    "laminar_py.learner.step",
    ("optimizer", "checkpoint", "step"),
    "parameters are not in the optimizer",
    within=4,
)
@plant(
    "adapter_not_in_optimizer",
    "laminar_py.learner.step",
    ("optimizer", "checkpoint", "weights"),
    "adapters are not in the optimizer",
    settings=LORA,
    within=4,
)
def _(module: ModuleType) -> None:
    build = module.Optimizer.__init__

    def half(self, model, settings, *, total_steps=None):
        build(self, model, settings, total_steps=total_steps)
        for group in self.adamw.param_groups:
            group["params"] = group["params"][::2]

    module.Optimizer.__init__ = half


# ---- checkpoints and resumes

RESUMED_AT = 400  # place of the stream beyond what the run before has drawn


@plant(
    "checkpoint_is_stale",
    "laminar_py.learner.checkpoint",
    "checkpoint",
    "later checkpoints hold the first weights",
    within=3,
)
def _(module: ModuleType) -> None:
    state, kept = module._state_of, {}

    def first(one):
        from copy import deepcopy

        weights, moments = state(one)
        return kept.setdefault("weights", deepcopy(dict(weights))), moments

    module._state_of = first


@plant(
    "optimizer_of_another_step",
    "laminar_py.learner.checkpoint",
    "checkpoint",
    "the optimizer has the state of another step",
    within=3,
)
def _(module: ModuleType) -> None:
    state, kept = module._state_of, {}

    def earlier(one):
        from copy import deepcopy

        weights, moments = state(one)
        before, kept["moments"] = kept.get("moments", moments), deepcopy(moments)
        return weights, before

    module._state_of = earlier


@plant(
    "resumes_from_zero",
    "laminar_py.learner.step",
    ("checkpoint", "weights"),
    "a resume begins from the start's weights",
    resumes=True,
    within=3,
)
def _(module: ModuleType) -> None:
    def load(self, folder):
        from laminar_py.learner.checkpoint import read_marker

        marker = read_marker(folder)
        self.steps_taken, self._optimizer.updates = marker.step, marker.updates
        return ""

    module.Learner.load = load


@plant(
    "optimizer_is_not_resumed",
    "laminar_py.learner.checkpoint",
    "checkpoint",
    "a resume has a new optimizer",
    resumes=True,
    within=3,
)
def _(module: ModuleType) -> None:
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    def weights_alone(model, optimizer, *, model_state_dict, optim_state_dict, options):
        set_model_state_dict(model, model_state_dict, options=options)
        for values in optimizer.state.values():
            for value in values.values():
                value.zero_()

    module.set_state_dict = weights_alone


@plant(
    "resume_skips_the_longest",
    "laminar_py.data.stream",
    "draws",
    "a resume skips the longest prompts",
    resumes=True,
    within=20,
)
def _(module: ModuleType) -> None:
    prompt = module.PromptStream.prompt

    def short_ones(self, place):
        import msgspec

        found = prompt(self, place)
        while place >= RESUMED_AT and len(found.text) > 12:
            found = msgspec.structs.replace(prompt(self, found.index + 1000), index=found.index + 1000)
        return msgspec.structs.replace(found, index=place)

    module.PromptStream.prompt = short_ones


@plant(
    "resume_repeats",
    "laminar_py.data.stream",
    "draws",
    "a resume draws prompts again",
    resumes=True,
    within=3,
)
def _(module: ModuleType) -> None:
    import msgspec

    prompt = module.PromptStream.prompt

    def again(self, place):
        drawn = prompt(self, place - 64 if place >= RESUMED_AT else place)
        return msgspec.structs.replace(drawn, index=place)

    module.PromptStream.prompt = again


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


@plant(
    "gradients_of_half",
    "laminar_py.learner.step",
    "step",
    "gradients of some microbatches are dropped",
    settings=["packer.max_tokens=1024"],  # several microbatches in the first step, too
)
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
    "updates_are_rounded_away",
    "laminar_py.learner.step",
    ("weights", "optimizer"),
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
    "reference_is_the_policy",
    "laminar_py.learner.reference",
    "reference",
    "the policy itself is its reference model",
    within=2,
    settings=["algorithm.kl_coef=0.01", "algorithm.reference_pass=learner"],
)
def _(module: ModuleType) -> None:
    module.open_reference = lambda policy, *arguments, **options: module.InnerReference(policy)


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

    def local(tensor):
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    def follows(policy, *arguments, **options):
        reference = open_reference(policy, *arguments, **options)
        add = reference.add_logprobs

        def copied(batches):
            with torch.no_grad():
                for mine, theirs in zip(reference.model.parameters(), policy.parameters(), strict=True):
                    local(mine).copy_(local(theirs))
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
    "rewards_of_others",
    "laminar_py.reward.scorer",
    "scores",
    "rewards of other responses",
    within=2,
)
def _(module: ModuleType) -> None:
    score = module.Scorer._score_request

    async def of_the_last(self, request):
        import msgspec

        last, self._last = getattr(self, "_last", request), request
        return msgspec.structs.replace(await score(self, last), trajectory_id=request.trajectory_id)

    module.Scorer._score_request = of_the_last


@plant("advantages_are_mixed_up", "laminar_py.control.groups", "scores", "advantages of other members", within=2)
def _(module: ModuleType) -> None:
    assign = module.Credit.assign

    def shifted(self, members):
        found = assign(self, members)
        return found[1:] + found[:1]

    module.Credit.assign = shifted


@plant(
    "stale_ones_stay",
    "laminar_py.control.settings",
    "scores",
    "trajectories beyond the bound are trained on",
    within=6,
    settings=["staleness.max_staleness=0", "staleness.policies=[drop]"],
)
def _(module: ModuleType) -> None:
    module.StalenessBound.weight = lambda self, staleness: 1.0


@plant(
    "a_task_is_starved",
    "laminar_py.control.consumption",
    "coverage",
    "drops starve one task",
    within=20,
    settings=[
        "data.train=[{path: experiments/quickstart/data/train.jsonl, task: a},"
        " {path: experiments/quickstart/data/train.jsonl, task: b}]"
    ],
)
def _(module: ModuleType) -> None:
    put = module.Consumption.put

    async def starving(self, group):
        if group.prompt.task == "b":
            from laminar_py.records.trajectory import DropReason

            self._state.drop(list(group.members.values()), DropReason.STALE, "old")
        await put(self, group)

    module.Consumption.put = starving


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


# ---- no failure: a run without the checks, whose cost is compared

CHECKS = {  # module -> names that a run without checks replaces, and what they then return
    "laminar_py.learner.proof": {
        "StepProver.add": None,
        "StepProver.check_gradients": None,
        "StepProver.mark": None,
        "StepProver.check_moved": None,
        "StepProver.finish": None,
    },
    "laminar_py.learner.step": {"Learner.probe": []},
    "laminar_py.learner.checkpoint": {"sample_learner": [], "saved_fault": "", "stored_fault": ""},
    "laminar_py.rollout.verifying": {"tensor_samples": {}, "Prober.answers": []},
    "laminar_py.engines.local.scheduler": {"Scheduler.checksum": WeightsChecksum("")},
    "laminar_py.runtime.orchestrator.alarms": {
        "Alarms._observe": None,
        "Alarms.stepped": None,
        "Alarms.reported": None,
        "Alarms.scored": None,
    },
    "laminar_py.data.draws": {"Draws.issued": "", "Draws.replay": "", "Draws.look_ahead": ""},
}
ASYNC = ("Prober.answers",)


def _each_check(module: ModuleType):
    """Yield owner, name, function and result of each check in a module."""
    for path, value in CHECKS[module.__name__].items():
        owner, _, name = path.rpartition(".")
        holder = getattr(module, owner) if owner else module
        yield holder, name, getattr(holder, name), value


def _without_checks(module: ModuleType) -> None:
    for holder, name, function, value in _each_check(module):

        def nothing(*arguments, value=value, **options):
            return value

        async def nothing_async(*arguments, value=value, **options):
            return value

        setattr(holder, name, nothing_async if iscoroutinefunction(function) else nothing)


spent: Counter[str] = Counter()  # CPU seconds in this process, by check, and when they were written


def _timed(module: ModuleType) -> None:
    """Add up the CPU seconds of each check; a file for each process in `SILENT_COST` has them."""
    for holder, name, function, _ in _each_check(module):
        if iscoroutinefunction(function):
            continue  # it waits for the engine, whose time is measured apart

        def timed(*arguments, function=function, name=f"{module.__name__}:{name}", **options):
            before = time.thread_time()
            began = time.thread_time()  # a measurement contains one read of the clock, as long as this one took
            try:
                return function(*arguments, **options)
            finally:
                spent[name] += time.thread_time() - began - (began - before)
                if time.monotonic() > spent["written"] + 1:
                    spent["written"] = time.monotonic()
                    Path(os.environ["SILENT_COST"], str(os.getpid())).write_text(json.dumps(spent))

        setattr(holder, name, timed)


UNCHECKED = Plant(failure="", of=tuple(CHECKS), patch=_without_checks, check="")
TIMED = Plant(failure="", of=tuple(CHECKS), patch=_timed, check="")
