"""Further silent failures of the kinds in `plants.py`, planted in the same way."""

import atexit
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from plants import ENGINE, LORA, TWO_RANKS, plant, sample_sharper

SCORER = "laminar_py.reward.scorer"
STEP = "laminar_py.learner.step"
PACKER = "laminar_py.learner.packing.packer"
RESUMES_REQUESTS = ("rollout.on_new_weights=resume",)

# ---- engine


@plant(
    "layers_are_swapped",
    f"{ENGINE}.weights",
    "probes",
    "two layers have each other's weights after the load",
    within=2,
)
def _(module: ModuleType) -> None:
    load = module.load_weights

    def swapped(folder, *, spec):
        weights = load(folder, spec=spec)
        return replace(weights, layers=weights.layers[::-1])

    module.load_weights = swapped


@plant("one_replica_stays", f"{ENGINE}.weights", "weights", "one of two replicas keeps its tensors", within=3)
def _(module: ModuleType) -> None:
    copy = module.Weights.copy_

    def copy_in_one(self, other):
        mark = Path(tempfile.gettempdir(), f"silent-{os.getppid()}")  # of the process that starts all replicas
        if not hasattr(module, "mine"):
            try:
                mark.touch(exist_ok=False)
                module.mine = True
                atexit.register(mark.unlink)
            except FileExistsError:
                module.mine = False
        if not module.mine:
            copy(self, other)

    module.Weights.copy_ = copy_in_one


@plant(
    "a_sync_is_lost", f"{ENGINE}.weights", "weights", "the third load of an engine leaves its tensors", within=12
)
def _(module: ModuleType) -> None:
    copy = module.Weights.copy_

    def copy_but_third(self, other):
        module.loads = getattr(module, "loads", 0) + 1
        if module.loads != 3:
            copy(self, other)

    module.Weights.copy_ = copy_but_third


@plant(
    "adapter_scale",
    "laminar_py.records.weights",
    "probes",
    "the engine scales adapters by alpha, not alpha / r",
    settings=LORA,
    within=3,
)
def _(module: ModuleType) -> None:
    scaling = module.AdapterConfig.scaling.fget
    module.AdapterConfig.scaling = property(lambda self: scaling(self) * 4)


@plant(
    "resumed_kv_is_stale",
    f"{ENGINE}.prefill",
    "probes",
    "a resumed request has keys of other tokens",
    settings=RESUMES_REQUESTS,
    within=3,
)
def _(module: ModuleType) -> None:
    cached = module.Job.cached_ids.fget

    def other(self):
        ids = cached(self).copy()
        if len(self.response) > 1:
            ids[len(self.request.prompt_ids) :] = ids[len(self.request.prompt_ids)]
        return ids

    module.Job.cached_ids = property(other)


@plant(
    "resumed_position_is_off",
    f"{ENGINE}.scheduler",
    "probes",
    "a resumed request loses a token of its prefix in the cache",
    settings=RESUMES_REQUESTS,
    within=3,
)
def _(module: ModuleType) -> None:
    decode = module.Scheduler._decode

    def shifted(self, rows, positions, drafts=None):
        import numpy as np

        resumed = np.array([len(self._running[int(slot)].response) > 1 for slot in rows.slots])
        return decode(self, rows, np.where(resumed, positions - 1, positions), drafts)

    module.Scheduler._decode = shifted


@plant(
    "recorded_without_temperature",
    f"{ENGINE}.sampling",
    "probes",
    "recorded log-probabilities are before the temperature",
    settings=["rollout.sampling.temperature=0.8"],
)
def _(module: ModuleType) -> None:
    sample_sharper(module, 1.0)


@plant(
    "mask_is_not_used",
    STEP,
    "probes",
    "sampling masks are recorded, and the learner ignores them",
    settings=["rollout.sampling.top_p=0.8", "rollout.record=[sampling_mask]"],
    within=3,
)
def _(module: ModuleType) -> None:
    logprobs = module.policy_logprobs

    def whole(model, batch, rows):
        import msgspec

        return logprobs(model, msgspec.structs.replace(batch, support=None), rows)

    module.policy_logprobs = whole


@plant(
    "server_cap", f"{ENGINE}.slots", "sampling", "the server's own limit of new tokens ends responses", within=2
)
def _(module: ModuleType) -> None:
    occupy = module.Slots.occupy

    def capped(self, slot, request, *, response):
        occupy(self, slot, request, response=response)
        self.limit[slot] = min(self.limit[slot], 64)

    module.Slots.occupy = capped


@plant(
    "first_tokens_are_shared",
    f"{ENGINE}.scheduler",
    ("groups", "sampling"),
    "the first eight tokens of all samples have one random number",
    within=20,
)
def _(module: ModuleType) -> None:
    uniforms = module.uniforms

    def shared(seeds, positions):
        import numpy as np

        return uniforms(np.where(positions < 8, np.uint64(7), seeds), positions)

    module.uniforms = shared


# ---- learner


@plant("end_is_not_trained", PACKER, "step", "the last token of a response is not in the loss")
def _(module: ModuleType) -> None:
    weights = module.StepWeights.token_weights

    def without_end(self, trajectory):
        out = weights(self, trajectory).copy()
        out[-1:] = 0
        return out

    module.StepWeights.token_weights = without_end


@plant("labels_are_shifted", PACKER, ("probes", "step"), "labels are shifted by one")
def _(module: ModuleType) -> None:
    lay_out = module.lay_out

    def shifted(bundle):
        import numpy as np

        found = lay_out(bundle)
        return replace(found, labels=np.roll(found.labels, 1))

    module.lay_out = shifted


@plant("positions_go_on", PACKER, "probes", "positions of packed rows are not reset")
def _(module: ModuleType) -> None:
    lay_out = module.lay_out

    def joined(bundle):
        found = lay_out(bundle)
        return replace(found, positions=found.positions + 1 + (found.positions > 4))

    module.lay_out = joined


@plant(
    "signs_of_groups",
    PACKER,
    "step",
    "advantages of every second group have the wrong sign",
    within=2,
)
def _(module: ModuleType) -> None:
    advantages = module.StepWeights.advantages

    def other(self, trajectory):
        return advantages(self, trajectory) * (-1 if int(trajectory.group_id[1:]) % 2 else 1)

    module.StepWeights.advantages = other


@plant("mean_of_another_group", "laminar_py.control.groups", "scores", "advantages have another group's mean")
def _(module: ModuleType) -> None:
    assign = module.Credit.assign

    def other(self, members):
        found = assign(self, members)
        mean = sum(member.reward for member in members) / len(members)
        before, module.mean = getattr(module, "mean", mean), mean
        return [replace(one, advantage=one.advantage + (mean - before) * one.scale) for one in found]

    module.Credit.assign = other


@plant(
    "divided_by_std_unasked",
    "laminar_py.runtime.orchestrator.setup",
    "scores",
    "advantages are divided by the deviation, though the algorithm has none",
    settings=["algorithm.name=dr_grpo"],
)
def _(module: ModuleType) -> None:
    of_kind = module.group_advantages
    from laminar_py.config.algorithm import Advantage

    module.group_advantages = lambda kind: of_kind(Advantage.GROUP_STD)


@plant("whitened_unasked", PACKER, "step", "the packer normalises advantages over the step, unasked", within=2)
def _(module: ModuleType) -> None:
    step_weights = module.step_weights
    module.step_weights = lambda bins, **options: step_weights(bins, **(options | {"normalises": True}))


@plant("signal_less_do_not_count", PACKER, "step", "groups without signal are not in the mean", within=3)
def _(module: ModuleType) -> None:
    step_weights = module.step_weights
    module.step_weights = lambda bins, **options: step_weights(bins, **(options | {"tokens_without_signal": ()}))


@plant("gradients_are_kept", STEP, "step", "gradients of the step before are not cleared", within=2)
def _(module: ModuleType) -> None:
    build = module.Optimizer.__init__

    def keeping(self, model, settings, *, total_steps=None):
        build(self, model, settings, total_steps=total_steps)
        self.adamw.zero_grad = lambda *_, **__: None

    module.Optimizer.__init__ = keeping


@plant(
    "no_clipping",
    "laminar_py.learner.optimizer",
    "optimizer",
    "gradients are not clipped",
    settings=["learner.grad_clip=0.01"],
    within=3,
)
def _(module: ModuleType) -> None:
    module.torch.nn.utils.clip_grads_with_norm_ = lambda *_: None


@plant("clipped_to_nothing", STEP, "optimizer", "gradients are clipped to nothing", within=3)
def _(module: ModuleType) -> None:
    build = module.Optimizer.__init__

    def tiny(self, model, settings, *, total_steps=None):
        build(self, model, settings.model_copy(update={"grad_clip": 1e-12}), total_steps=total_steps)

    module.Optimizer.__init__ = tiny


@plant("lr_is_ten_times", STEP, "optimizer", "the learning rate is ten times the schedule's", within=3)
def _(module: ModuleType) -> None:
    build = module.Optimizer.__init__

    def faster(self, model, settings, *, total_steps=None):
        build(self, model, settings, total_steps=total_steps)
        step = self.adamw.step

        def ten(*_, **__):
            for group in self.adamw.param_groups:
                group["lr"] *= 10
            step()

        self.adamw.step = ten

    module.Optimizer.__init__ = faster


@plant(
    "schedule_restarts",
    STEP,
    ("optimizer", "step"),
    "a resume restarts the schedule of the learning rate",
    resumes=True,
    within=3,
    settings=["learner.warmup_steps=10"],
)
def _(module: ModuleType) -> None:
    update = module.Optimizer.update

    def from_zero(self, step, *, loss):
        self.first = getattr(self, "first", step)
        return update(self, step - self.first, loss=loss)

    module.Optimizer.update = from_zero


@plant("decays_everything", STEP, "optimizer", "weight decay is larger than asked", within=3)
def _(module: ModuleType) -> None:
    build = module.Optimizer.__init__

    def decaying(self, model, settings, *, total_steps=None):
        build(self, model, settings, total_steps=total_steps)
        for group in self.adamw.param_groups:
            group["weight_decay"] = 1.0

    module.Optimizer.__init__ = decaying


@plant("updates_twice", STEP, "optimizer", "the optimizer steps twice for each batch", within=3)
def _(module: ModuleType) -> None:
    build = module.Optimizer.__init__

    def twice(self, model, settings, *, total_steps=None):
        build(self, model, settings, total_steps=total_steps)
        step = self.adamw.step

        def both(*_, **__):
            step()
            step()

        self.adamw.step = both

    module.Optimizer.__init__ = twice


@plant(
    "critic_is_not_in_optimizer",
    "laminar_py.learner.critic",
    ("optimizer", "checkpoint"),
    "the critic is not in its optimizer",
    settings=["algorithm.name=ppo"],
)
def _(module: ModuleType) -> None:
    build = module.Critic.__init__

    def apart(self, *arguments, **options):
        build(self, *arguments, **options)
        for group in self.optimizer.adamw.param_groups:
            group["params"] = []

    module.Critic.__init__ = apart


@plant("moments_are_reset", STEP, "optimizer", "the optimizer forgets its moments after each step", within=3)
def _(module: ModuleType) -> None:
    update = module.Optimizer.update

    def forgetful(self, step, *, loss):
        self.adamw.state.clear()
        return update(self, step, loss=loss)

    module.Optimizer.update = forgetful


@plant("embeddings_are_frozen", "laminar_py.learner.trained", "optimizer", "the embeddings are frozen", within=4)
def _(module: ModuleType) -> None:
    load = module.load_policy

    def frozen(*arguments, **options):
        model = load(*arguments, **options)
        model.model.embed_tokens.weight.requires_grad_(False)
        return model

    module.load_policy = frozen


@plant(
    "an_adapter_is_frozen",
    "laminar_py.learner.lora",
    "optimizer",
    "one adapter is frozen",
    settings=LORA,
    within=2,
)
def _(module: ModuleType) -> None:
    build = module.LoraAdapters.__init__

    def frozen(self, model, settings, *, base, seed):
        build(self, model, settings, base=base, seed=seed)
        next(one for name, one in model.named_parameters() if ".lora_B." in name).requires_grad_(False)

    module.LoraAdapters.__init__ = frozen


@plant(
    "penalty_has_the_wrong_sign",
    "laminar_py.learner.losses.loss",
    "step",
    "the penalty pushes the policy away from its reference",
    within=3,
    # `sync` trains on fresh tokens alone, whose ratio is 1
    settings=["algorithm.kl_coef=0.05", "algorithm.reference_pass=learner", "schedule=sync"],
)
def _(module: ModuleType) -> None:
    for kind, estimate in list(module.ESTIMATORS.items()):
        module.ESTIMATORS[kind] = lambda now, reference, estimate=estimate: -estimate(now, reference)


@plant(
    "ratio_against_newest",
    "laminar_py.learner.losses.loss",
    "step",
    "the importance ratio is against the newest version",
    within=3,
)
def _(module: ModuleType) -> None:
    make = module.make_loss_inputs

    def newest(batch, rows, logprobs, *arguments, **options):
        inputs = make(batch, rows, logprobs, *arguments, **options)
        return replace(inputs, behaviour=logprobs.detach(), proximal=logprobs.detach())

    module.make_loss_inputs = newest


@plant("mean_over_ranks", STEP, "step", "ranks average gradients that they should add", settings=TWO_RANKS)
def _(module: ModuleType) -> None:
    backward = module.Learner._backward

    def halved(self, *arguments, **options):
        loss = backward(self, *arguments, **options)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        return loss

    module.Learner._backward = halved


@plant(
    "publishes_late", STEP, ("weights", "probes"), "the learner publishes the weights of the step before", within=3
)
def _(module: ModuleType) -> None:
    sources = module.Learner.sources

    def before(self, *, dtype, gather):
        tensors = module.full_tensors(sources(self, dtype=dtype, gather=gather))
        now = [module.TensorSource.whole(name, tensor.clone()) for name, tensor in tensors]
        late, self._before = getattr(self, "_before", now), now
        return late

    module.Learner.sources = before


@plant(
    "checkpoint_is_rounded",
    "laminar_py.learner.checkpoint",
    "checkpoint",
    "checkpoints hold weights rounded to bf16",
    within=3,
)
def _(module: ModuleType) -> None:
    state = module._state_of

    def rounded(one):
        weights, moments = state(one)
        return {name: value.bfloat16().float() for name, value in weights.items()}, moments

    module._state_of = rounded


# ---- data, rewards, evaluation


@plant(
    "scorer_misses_a_token",
    SCORER,
    ("scores", "rewards"),
    "the scorer gets responses without their last token",
    within=20,
)
def _(module: ModuleType) -> None:
    score = module.Scorer._score_request

    async def cut(self, request):
        import msgspec

        return await score(self, msgspec.structs.replace(request, response_ids=request.response_ids[:-1]))

    module.Scorer._score_request = cut


@plant(
    "timeouts_are_zeros",
    "laminar_py.reward.calls.pool",
    "scores",
    "a time limit of the scorer returns 0",
    settings=["reward.use=[experiments/silent/rewards.py:slow]", "reward.timeout_s=0.2"],
    within=2,
)
def _(module: ModuleType) -> None:
    call = module.CallPool.call

    async def zero(self, request):
        import msgspec

        found = await call(self, request)
        return msgspec.structs.replace(found, failure=None, value=0.0) if found.failure is not None else found

    module.CallPool.call = zero


@plant(
    "weight_of_a_term_is_lost",
    SCORER,
    "scores",
    "a penalty's weight is lost",
    settings=[
        "reward.use=[{kind: exact, pattern: '#(\\d)$'},"
        " {path: experiments/silent/rewards.py:length, weight: -0.5}]"
    ],
    within=2,
)
def _(module: ModuleType) -> None:
    add_up = module.add_up

    def unweighted(trajectory_id, outcomes, **options):
        return add_up(
            trajectory_id,
            [(term.model_copy(update={"weight": abs(term.weight)}), one) for term, one in outcomes],
            **options,
        )

    module.add_up = unweighted


@plant(
    "rows_are_left_out",
    "laminar_py.data.problems",
    "draws",
    "a filter drops half of the rows when it reads them",
    within=3,
)
def _(module: ModuleType) -> None:
    read = module.read_records
    module.read_records = lambda source, kind: (row for row in read(source, kind) if row[0] % 2)


@plant(
    "weights_of_sources_are_lost",
    "laminar_py.data.stream",
    "draws",
    "the mixture has other weights",
    settings=[
        "data.train=[{path: experiments/quickstart/data/train.jsonl, task: a, weight: 3},"
        " {path: experiments/quickstart/data/train.jsonl, task: b, weight: 1}]"
    ],
    within=3,
)
def _(module: ModuleType) -> None:
    build = module.WeightedSources.__init__
    module.WeightedSources.__init__ = lambda self, weights, *, seed: build(self, [1.0 for _ in weights], seed=seed)


@plant(
    "evaluates_half",
    "laminar_py.runtime.orchestrator.evaluator",
    "evaluation",
    "an evaluation has half of its problems",
    within=3,
)
def _(module: ModuleType) -> None:
    build = module.Evaluator.__init__

    def half(self, *arguments, **options):
        build(self, *arguments, **options)
        self._sets = {name: prompts[: len(prompts) // 2] for name, prompts in self._sets.items()}

    module.Evaluator.__init__ = half


@plant(
    "evaluation_leaves_out_failures",
    "laminar_py.runtime.orchestrator.evaluator",
    "evaluation",
    "an evaluation counts the answers that were finished alone",
    within=3,
)
def _(module: ModuleType) -> None:
    figures = module.set_figures
    module.set_figures = lambda answers, **options: figures([one for one in answers if one.reward], **options)


# ---- rounded weights, of which the run makes an end by itself

FP8 = ("rollout.engine.quantization=fp8",)


@plant(
    "fp8_scale_is_wrong",
    f"{ENGINE}.weights",
    "quantization",
    "a block of rounded weights has a scale that is wrong by 4",
    settings=FP8,
    within=2,
)
def _(module: ModuleType) -> None:
    read = module._Folder.read

    def read_wrong(self, name, *shape):
        values = read(self, name, *shape)
        if self._quantized and name == "model.layers.0.mlp.down_proj.weight":
            values[: module.fp8.BLOCK, : module.fp8.BLOCK] *= 4
        return values

    module._Folder.read = read_wrong


@plant(
    "fp8_has_a_large_channel",
    f"{ENGINE}.fp8",
    "quantization",
    "a channel is a million times larger, which the norm before it divides back",
    settings=FP8,
    within=2,
)
def _(module: ModuleType) -> None:
    rounded = module.rounded

    def large(weight):
        scaled = weight.clone()
        scaled[:, 0] *= 2**20
        values = rounded(scaled)
        values[:, 0] /= 2**20  # the norm's part
        return values

    module.rounded = large
