"""Algorithms: their settings, built-in algorithms in a line each, and the registry for algorithms of packages.

The name of an algorithm fills in settings that the file leaves out, so that each setting can be changed by itself.
Equations are in `learner.losses`. This module imports no torch, since the controller uses it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

from pydantic import Field, PlainValidator, SerializeAsAny, WithJsonSchema, model_validator

from laminar_py.config.critic import CriticConfig
from laminar_py.config.registry import Registry, named_section
from laminar_py.config.reward import RewardConfig
from laminar_py.config.rollout import RolloutConfig, SamplingConfig
from laminar_py.config.section import ConfigError, Section, Share, is_address
from laminar_py.records.columns import (
    ACTORS,
    COMPUTED,
    PLACES,
    REFERENCE_LOGPROBS,
    TEACHER_LOGPROBS,
    VALUE_TARGETS,
    VALUES,
    Column,
    Dtype,
    Source,
)


class Advantage(StrEnum):
    """How advantages are computed from the rewards of a group; see `AlgorithmConfig.advantage`."""

    GROUP_STD = "group_std"
    GROUP_MEAN = "group_mean"
    LEAVE_ONE_OUT = "leave_one_out"
    BATCH_STD = "batch_std"
    GAE = "gae"
    NONE = "none"


class Objective(StrEnum):
    """Function of the new policy that training maximises; see `AlgorithmConfig.objective`."""

    CLIP = "clip"
    SEQUENCE_CLIP = "sequence_clip"
    WEIGHTED = "weighted"
    BALANCE = "balance"


def _as_objective(given: object) -> str:
    """Return the objective of a name, or the place of a function. Raises `ConfigError`."""
    if isinstance(given, str) and ".py:" in given:
        return given
    if given in list(Objective):
        return Objective(str(given))
    names = ", ".join(Objective)
    raise ConfigError(
        f"algorithm.objective={given}: no such objective; choose {names}, or path/to/file.py:function"
    )


class Aggregation(StrEnum):
    """How losses of tokens become one number; see `AlgorithmConfig.aggregation`."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"
    CONSTANT = "constant"


class Proximal(StrEnum):
    """Policy at the centre of the trust region; see `AlgorithmConfig.proximal`."""

    BEHAVIOUR = "behaviour"
    RECOMPUTE = "recompute"
    INTERPOLATE = "interpolate"


class Correction(StrEnum):
    """Weight or mask for tokens that another policy sampled; see `AlgorithmConfig.correction`."""

    NONE = "none"
    TIS = "tis"
    MIS = "mis"
    ICEPOP = "icepop"
    SEQUENCE_MASK = "sequence_mask"
    NEGATIVE_MASK = "negative_mask"


WEIGHTS = (Correction.TIS, Correction.MIS, Correction.ICEPOP)  # other corrections mask whole responses
BOUNDED = (Correction.ICEPOP, Correction.SEQUENCE_MASK)  # have a lower bound too


class Divergence(StrEnum):
    """Estimators of the KL divergence to the reference model."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class Truncated(StrEnum):
    """Use of responses that a cap ended; see `AlgorithmConfig.truncated`."""

    TRAIN = "train"
    MASK = "mask"


class ReferencePass(StrEnum):
    """Process in which the reference model runs; see `AlgorithmConfig.reference_pass`."""

    LEARNER = "learner"
    STAGE = "stage"


def _weighted(clip_high: float) -> dict[str, Any]:
    """Return settings of truncated importance sampling: ratios are cut above 1 + `clip_high`, not below."""
    return {"objective": Objective.WEIGHTED, "clip_low": 1.0, "clip_high": clip_high}


OF_CRITIC = (
    Column(name=PLACES, dtype=Dtype.INT32, source=Source.PACKER),
    Column(name=ACTORS, dtype=Dtype.INT32, source=Source.PACKER),
    Column(name=VALUES, source=Source.CRITIC),
    Column(name=VALUE_TARGETS, source=Source.CRITIC),
)


# name -> settings that differ from the defaults of the fields, which make GRPO
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": Advantage.GROUP_MEAN, "aggregation": Aggregation.CONSTANT},
    "dapo": {"clip_high": 0.28, "aggregation": Aggregation.TOKEN_MEAN, "truncated": Truncated.MASK},
    "rloo": {"advantage": Advantage.LEAVE_ONE_OUT, "aggregation": Aggregation.CONSTANT, **_weighted(4.0)},
    "reinforce_pp": {"advantage": Advantage.BATCH_STD, "aggregation": Aggregation.TOKEN_MEAN},
    "gspo": {"objective": Objective.SEQUENCE_CLIP, "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"aggregation": Aggregation.TOKEN_MEAN, **_weighted(4.0)},
    "aipo": {"advantage": Advantage.GROUP_MEAN, **_weighted(3.0)},
    "decoupled_ppo": {
        "proximal": Proximal.RECOMPUTE,
        "correction": Correction.TIS,
        "correction_high": 5.0,
        "updates_per_step": 4,
    },
    "ppo": {"advantage": Advantage.GAE, "aggregation": Aggregation.TOKEN_MEAN},
    "tba": {"advantage": Advantage.NONE, "objective": Objective.BALANCE},
    "distill": {"advantage": Advantage.NONE, "teacher_coef": 1.0, **_weighted(1.0)},
}


class AlgorithmConfig(Section):
    """The loss. `name` fills in settings that are left out; the defaults below make `grpo`."""

    name: str = "grpo"
    """One of `grpo`, `dr_grpo`, `dapo`, `rloo`, `reinforce_pp`, `gspo`, `cispo`, `aipo`, `decoupled_ppo`, `ppo`,
    `tba`, `distill`, or a name that an installed package registers."""
    advantage: Advantage = Advantage.GROUP_STD
    """`group_std`: (r - mean) / std of the group. `group_mean`: r - mean. `leave_one_out`: r minus the mean of the
    group's other responses. `batch_std`: (r - mean) / std over the trained tokens of the whole step, which then
    keeps all groups, whatever `rollout.without_signal` says. `gae`: generalised advantage estimation by a critic,
    normalised in the same way; groups may have one member. A response that a cap ends is an end like others: its
    reward counts, and no value is added for tokens that never came. `none`: 0. With process rewards, r is the
    return of a token (the sum of rewards from there on), and mean and std of a group are over its tokens, where
    each response counts once."""
    critic: CriticConfig | None = None
    """For `gae`: the value model."""
    overlong_tokens: Annotated[int, Field(ge=1)] | None = None
    """DAPO's overlong shaping: a response that reaches the last `overlong_tokens` before
    `rollout.sampling.max_new_tokens` loses reward, from 0 at the first of them linearly to 1 at the cap. The
    shaping changes advantages; whether a group has signal depends on its rewards alone. None: no shaping."""
    truncated: Truncated = Truncated.TRAIN
    """Use of responses that a cap on tokens, seconds or turns ended: `train` on them, or `mask` them from the
    loss (DAPO's overlong filtering). Masked responses count for the advantages of their group and are consumed
    with weight 0."""
    objective: Annotated[str, PlainValidator(_as_objective), WithJsonSchema({"type": "string"})] = Objective.CLIP
    """`clip`: PPO's, token by token. `sequence_clip`: one ratio for a whole response. `weighted`: the
    log-probability times a capped importance weight, which has a gradient everywhere. `balance`: minus the
    squared imbalance of a response, `log Z + log (policy / reference) - reward / beta`. It needs no importance
    weights for old responses. log Z of a prompt is estimated from its responses in the step, by one more forward
    pass. `path/to/file.py:function`: a function of your own ([extending.md](extending.md))."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """For `balance`: the optimal policy is the reference model's policy times exp(reward / beta)."""
    clip_low: Share = 0.2
    """Ratios below 1 - clip_low are clipped; 1: no lower clip."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """Ratios above 1 + clip_high are clipped."""
    importance_cap: Annotated[float, Field(gt=1)] | None = None
    """For `clip`: cap on ratios where the clip does not act (tokens with a negative advantage that became
    likelier); at least 1 + clip_high. None: no cap, as in PPO."""
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN
    """`sequence_mean`: mean over the tokens of each response, then over responses. `token_mean`: over tokens.
    `constant`: sum over tokens divided by `rollout.sampling.max_new_tokens`, then mean over responses."""
    proximal: Proximal = Proximal.BEHAVIOUR
    """Policy in the denominator of ratios. `behaviour`: the policy that sampled the token. `recompute`: the
    learner's policy at the start of the step. `interpolate`: between the two, log-linear in the token's staleness
    in learner steps."""
    correction: Correction = Correction.NONE
    """Weight of a token by its ratio of proximal to behaviour policy: cut at `correction_high` (`tis`), 0 above it
    (`mis`), or 0 outside both bounds (`icepop`). Or mask of whole responses by their mean ratio of new to
    behaviour policy: outside both bounds (`sequence_mask`), or below 1 / `correction_high` with a negative
    advantage (`negative_mask`)."""
    correction_low: Annotated[float, Field(ge=0)] = 0.5
    """Lower bound of `icepop` and `sequence_mask`."""
    correction_high: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of `correction`."""
    updates_per_step: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps in a learner step, each on its own part of the microbatches; at most the number of
    microbatches of a rank. From the second on, the policy of `proximal: recompute` differs from the current
    one."""
    kl_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the divergence from the reference model. The reference is loaded if this is above 0, or for
    `balance`."""
    kl_estimator: Divergence = Divergence.K3
    """`k3`, `k2`: added to the loss of each token. `k1`: subtracted from the advantage, since its gradient has
    mean 0."""
    reference: Path | None = None
    """Hugging Face folder of the reference model, which never changes; None: the model that RL begins with."""
    reference_pass: ReferencePass = ReferencePass.LEARNER
    """`learner`: each rank runs the reference at the start of a step. `stage`: a process of its own, on a device
    of the learner's kind, runs the reference on each trajectory when it is finished, beside generation and
    training."""
    teacher_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Advantage of a token for each nat by which the teacher's log-probability is above the policy's. It is added
    to `advantage`. Groups with equal rewards train, too, whatever `rollout.without_signal` says."""
    teacher: str | None = None
    """The teacher, which has the tokenizer of `model.path`: a Hugging Face folder, run by a process of its own on
    a device of the learner's kind, or the address of a running SGLang server, e.g. `http://10.0.0.5:30000`, whose
    key is in SGLANG_API_KEY. None: your reward function returns the column `teacher_logprobs`, the teacher's
    log-probability of each token, at the same temperature and over the whole vocabulary."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """Extra inputs per token that this loss needs; a subclass adds its own."""
        teacher = Column(name=TEACHER_LOGPROBS, source=Source.TEACHER if self.teacher else Source.SCORER)
        reference = Column(name=REFERENCE_LOGPROBS, source=Source.REFERENCE)
        compares = self.kl_coef > 0 or self.objective is Objective.BALANCE
        valued = () if self.critic is None else OF_CRITIC
        return (*((teacher,) if self.teacher_coef > 0 else ()), *((reference,) if compares else ()), *valued)

    @property
    def scored_columns(self) -> tuple[Column, ...]:
        """Columns that the reward function must return."""
        return tuple(column for column in self.columns if column.source is Source.SCORER)

    @property
    def packed_columns(self) -> tuple[Column, ...]:
        """Columns that trajectories have before the learner gets them; the learner computes the other columns."""
        given = (Source.SCORER, Source.PACKER, *self.stages)
        return tuple(column for column in self.columns if column.source in given)

    @property
    def stages(self) -> tuple[Source, ...]:
        """Frozen models with a process each, beside generation and training; each is the source of a column."""
        runs = {Source.REFERENCE: self.reference_in_own_process, Source.TEACHER: self.teacher is not None}
        return tuple(source for source, runs_alone in runs.items() if runs_alone)

    @property
    def computing_stages(self) -> tuple[Source, ...]:
        """Stages that hold weights; for any other stage a server holds them."""
        return tuple(one for one in self.stages if one is not Source.TEACHER or self.teacher_url is None)

    @property
    def teacher_url(self) -> str | None:
        """Address of the server that runs the teacher, if one does."""
        return self.teacher if self.teacher and "://" in self.teacher else None

    @property
    def teacher_folder(self) -> Path | None:
        """Folder of the teacher that a process of the run holds, if one does."""
        return Path(self.teacher) if self.teacher and self.teacher_url is None else None

    @property
    def has_reference(self) -> bool:
        """True if the loss needs a reference model."""
        return any(column.source is Source.REFERENCE for column in self.columns)

    @property
    def objective_file(self) -> str | None:
        """`path/to/file.py:function` of your objective, None for a built-in one."""
        return None if self.objective in list(Objective) else self.objective

    @property
    def reference_in_own_process(self) -> bool:
        """True where the reference model runs in a process of its own."""
        return self.reference_pass is ReferencePass.STAGE

    @property
    def learns_from_equal_rewards(self) -> bool:
        """True where groups with equal rewards are to train, too; a subclass may override it."""
        return self.teacher_coef > 0

    @property
    def needs_whole_responses(self) -> bool:
        """True where the loss compares means of responses, or may: a longer tree is not cut then."""
        by_token = self.objective in (Objective.CLIP, Objective.WEIGHTED)
        masks = self.correction not in (Correction.NONE, *WEIGHTS)
        chains = self.critic is not None  # values of later tokens are part of a token's advantage
        return not by_token or masks or chains or ALGORITHMS.get(self.name).objective is not None

    def corrected(self) -> Self:
        """Return the settings for engines that round their weights: with a correction in place of none.

        TIS where a proximal policy is computed, else the mask of responses. `balance` needs no correction. Raises
        `ConfigError` if the bounds of the mask are no range.
        """
        if self.correction is not Correction.NONE or self.objective is Objective.BALANCE:
            return self
        weighs = self.proximal is not Proximal.BEHAVIOUR
        changed = self.model_copy(update={"correction": Correction.TIS if weighs else Correction.SEQUENCE_MASK})
        changed._check_ratios()
        return changed

    @property
    def normalises_step(self) -> bool:
        """True where advantages are normalised over a whole step, so that every group stays in it."""
        return self.advantage in (Advantage.BATCH_STD, Advantage.GAE)

    @property
    def trains_on_all_groups(self) -> bool:
        """True where a step keeps groups with equal rewards, whatever `rollout.without_signal` says."""
        return self.normalises_step or self.learns_from_equal_rewards

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, settings: Any) -> Any:
        """Add the preset of the section's `name` for settings that the section leaves out."""
        if not isinstance(settings, dict):
            return settings
        filled = PRESETS.get(str(settings.get("name", "grpo")), {}) | settings
        return {"critic": {}} | filled if filled.get("advantage") == Advantage.GAE else filled

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Check the settings together. Raises `ConfigError`."""
        self._check_columns()
        self._check_ratios()
        if self.objective is Objective.BALANCE:
            self._check_balance()
        self._check_teaching()
        self._check_critic()
        if self.reference_in_own_process and not self.has_reference:
            raise ConfigError(
                f"algorithm.reference_pass=stage: there is no reference model with algorithm.kl_coef=0 and"
                f" algorithm.objective={self.objective}; set kl_coef above 0, or leave reference_pass out"
            )
        return self

    def _check_columns(self) -> None:
        """Raise `ConfigError` if a column is declared twice, or its frozen model cannot give it."""
        seen = set[str]()
        for column in self.columns:
            if column.name in seen:
                raise ConfigError(
                    f"algorithm.name={self.name}: declares column {column.name!r} twice; fix that package"
                )
            seen.add(column.name)
            names = COMPUTED.get(column.source)
            if names is not None and column.name not in names:
                raise ConfigError(
                    f"algorithm.name={self.name}: column {column.name!r} cannot come from the {column.source},"
                    f" which gives only {', '.join(map(repr, names))}; fix that package"
                )

    def _check_critic(self) -> None:
        """Raise `ConfigError` for a critic without use, or `gae` without a critic."""
        if self.advantage is not Advantage.GAE and self.critic is not None:
            raise ConfigError(
                f"algorithm.critic: advantage={self.advantage} uses no values; leave critic out, or set"
                " algorithm.advantage to gae"
            )
        if self.advantage is Advantage.GAE and self.critic is None:
            raise ConfigError("algorithm.critic=null: advantage=gae needs a critic; leave critic out, or name lr")
        if self.critic is not None and self.objective is Objective.BALANCE:
            raise ConfigError(
                "algorithm.advantage=gae: objective=balance has no advantages; set advantage to none"
            )

    def _check_ratios(self) -> None:
        """Raise `ConfigError` if a cap or correction of importance ratios has no effect or an empty range."""
        if self.importance_cap is not None and self.importance_cap < 1 + self.clip_high:
            raise ConfigError(
                f"algorithm.importance_cap={self.importance_cap} is below 1 + algorithm.clip_high ="
                f" {1 + self.clip_high}, so the clip would never act; raise it"
            )
        if self.correction in WEIGHTS and self.proximal is Proximal.BEHAVIOUR:
            raise ConfigError(
                f"algorithm.correction={self.correction}: has no effect, since algorithm.proximal=behaviour makes"
                " every weight 1; set algorithm.proximal to recompute or interpolate"
            )
        if self.correction in BOUNDED and self.correction_low >= self.correction_high:
            raise ConfigError(
                f"algorithm.correction_low={self.correction_low} is not below algorithm.correction_high ="
                f" {self.correction_high}; lower it"
            )

    def _check_balance(self) -> None:
        """Raise `ConfigError` for settings that the objective `balance` cannot use."""
        if self.aggregation is not Aggregation.SEQUENCE_MEAN:
            raise ConfigError(
                f"algorithm.aggregation={self.aggregation}: objective=balance is a loss of whole responses; set"
                " it to sequence_mean"
            )
        if self.correction is not Correction.NONE:
            raise ConfigError(
                f"algorithm.correction={self.correction}: objective=balance needs no correction; set it to none"
            )
        if self.teacher_coef or (self.kl_coef and self.kl_estimator is Divergence.K1):
            raise ConfigError(
                f"algorithm.teacher_coef={self.teacher_coef} kl_estimator={self.kl_estimator}: objective=balance"
                " has no advantages that these could change; set teacher_coef to 0, and kl_estimator to k2 or k3"
            )

    def _check_teaching(self) -> None:
        """Raise `ConfigError` if no setting gives a gradient, or settings of advantages contradict each other."""
        if self.advantage is Advantage.NONE and self.overlong_tokens is not None:
            raise ConfigError(
                f"algorithm.overlong_tokens={self.overlong_tokens} changes advantages, and"
                " algorithm.advantage=none has none; leave overlong_tokens out"
            )
        learns = self.advantage is not Advantage.NONE or self.learns_from_equal_rewards or self.has_reference
        if not learns:
            raise ConfigError(
                "algorithm.advantage=none leaves a loss without gradient; set another advantage, or teacher_coef"
            )
        if self.teacher is not None and not self.teacher_coef:
            raise ConfigError(
                f"algorithm.teacher={self.teacher}: has no effect with teacher_coef=0; set teacher_coef above"
                " 0, or leave teacher out"
            )
        if self.teacher_url is not None and not is_address(self.teacher_url):
            raise ConfigError(
                f"algorithm.teacher={self.teacher}: no address of a server; write one such as"
                " http://10.0.0.5:30000"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An algorithm in the registry, e.g. `Algorithm(settings=HintedConfig, objective=hinted)`.

    `settings` is the model of the section `algorithm`; it declares the columns of the loss. `objective` takes
    `learner.losses.objectives.LossInputs` and the settings, and returns [N], each trained token's part of the
    maximised sum. Without it, the built-in objective that the settings name is used. Only the learner calls
    `objective`, so it may import torch inside.
    """

    settings: type[AlgorithmConfig] = AlgorithmConfig
    objective: Callable[[Any, Any], Any] | None = None


BUILT_IN = Algorithm()
ALGORITHMS = Registry(
    Algorithm,
    field="algorithm.name",
    group="laminar_py.algorithms",
    built_in=dict.fromkeys(PRESETS, "laminar_py.config.algorithm:BUILT_IN"),
)


AnyAlgorithmConfig: TypeAlias = Annotated[
    SerializeAsAny[AlgorithmConfig],
    PlainValidator(named_section(AlgorithmConfig, key="name", registry=ALGORITHMS)),
    WithJsonSchema({"type": "object"}),
]
"""Section that the settings of the named algorithm validate; its JSON keeps all of their fields."""


def check_overlong(algorithm: AlgorithmConfig, sampling: SamplingConfig) -> None:
    """Raise `ConfigError` if `overlong_tokens` is longer than a response can be."""
    tokens, cap = algorithm.overlong_tokens, sampling.max_new_tokens
    if tokens is not None and tokens > cap:
        raise ConfigError(
            f"algorithm.overlong_tokens={tokens} is more than rollout.sampling.max_new_tokens={cap}; lower it"
        )


def check_reference(algorithm: AlgorithmConfig, *, random_start: bool) -> None:
    """Raise `ConfigError` if the loss needs a reference model and its weights would be random."""
    if algorithm.has_reference and algorithm.reference is None and random_start:
        raise ConfigError(
            f"algorithm.name={algorithm.name} kl_coef={algorithm.kl_coef}: the reference is the model that RL"
            " begins with, and model.from_scratch makes it random; set algorithm.reference to a folder"
        )


def check_teaching(algorithm: AlgorithmConfig, rollout: RolloutConfig, reward: RewardConfig) -> None:
    """Raise `ConfigError` if columns or log-probabilities that the algorithm needs would be missing."""
    needed = ", ".join(column.name for column in algorithm.scored_columns)
    for terms in reward.rules.values():
        if needed and not any(term.gives_columns for term in terms):
            raise ConfigError(
                f"reward.use={', '.join(term.title for term in terms)} gives one number, and"
                f" algorithm.name={algorithm.name} needs {needed} of each token; name a function of your own that"
                " returns a Reward with these columns"
            )
    if algorithm.teacher_coef > 0 and rollout.sampling.cuts_vocabulary:
        raise ConfigError(
            f"algorithm.teacher_coef={algorithm.teacher_coef} needs log-probabilities over the whole vocabulary,"
            " which rollout.sampling cuts; leave top_k, top_p and min_p out"
        )
    if algorithm.teacher_url is not None and rollout.sampling.temperature != 1:
        raise ConfigError(
            f"algorithm.teacher={algorithm.teacher}: a server gives log-probabilities at temperature 1, and"
            f" rollout.sampling.temperature={rollout.sampling.temperature}; set that to 1, or name the folder of"
            " the teacher"
        )
