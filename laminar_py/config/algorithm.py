"""Algorithms: their registry, the settings of each, and the built-in ones as one line each.

A name fills in what the file leaves out, so every part of an algorithm can be turned by itself. Equations are in
`learner.losses`. Nothing here imports torch, since the controller uses it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

from pydantic import Field, PlainValidator, SerializeAsAny, WithJsonSchema, model_validator

from laminar_py.config.data import ModelConfig, WarmStartConfig
from laminar_py.config.registry import Registry, named_section
from laminar_py.config.reward import RewardConfig
from laminar_py.config.rollout import RolloutConfig, SamplingConfig, WithoutSignal
from laminar_py.config.section import ConfigError, Section, Share
from laminar_py.records.columns import REFERENCE_LOGPROBS, TEACHER_LOGPROBS, Column, Source


class Advantage(StrEnum):
    """Ways from the rewards of a group to advantages."""

    GROUP_STD = "group_std"
    GROUP_MEAN = "group_mean"
    LEAVE_ONE_OUT = "leave_one_out"
    BATCH_STD = "batch_std"
    NONE = "none"


class Objective(StrEnum):
    """Functions of the new policy that are maximised."""

    CLIP = "clip"
    SEQUENCE_CLIP = "sequence_clip"
    WEIGHTED = "weighted"
    BALANCE = "balance"


class Aggregation(StrEnum):
    """Weights that make one number of token losses."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"
    CONSTANT = "constant"


class Proximal(StrEnum):
    """Policies that the trust region can be around."""

    BEHAVIOUR = "behaviour"
    RECOMPUTE = "recompute"
    INTERPOLATE = "interpolate"


class Correction(StrEnum):
    """Weights and masks for tokens that another policy drew."""

    NONE = "none"
    TIS = "tis"
    MIS = "mis"
    ICEPOP = "icepop"
    SEQUENCE_MASK = "sequence_mask"
    NEGATIVE_MASK = "negative_mask"


WEIGHTS = (Correction.TIS, Correction.MIS, Correction.ICEPOP)  # the others are masks
BOUNDED = (Correction.ICEPOP, Correction.SEQUENCE_MASK)  # on both sides


class Divergence(StrEnum):
    """Estimators of the KL divergence to the reference."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class Truncated(StrEnum):
    """Parts that responses which a cap has cut play in the loss."""

    TRAIN = "train"
    MASK = "mask"


class ReferencePass(StrEnum):
    """Places where the reference model computes its log-probabilities."""

    LEARNER = "learner"
    STAGE = "stage"


def _weighted(clip_high: float) -> dict[str, Any]:
    """Truncated importance sampling: ratios are cut at 1 + clip_high, and nowhere below."""
    return {"objective": Objective.WEIGHTED, "clip_low": 1.0, "clip_high": clip_high}


PRESETS: dict[str, dict[str, Any]] = {  # what differs from the fields' own defaults, which are those of GRPO
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
    "tba": {"advantage": Advantage.NONE, "objective": Objective.BALANCE},
    "distill": {"advantage": Advantage.NONE, "teacher_coef": 1.0, **_weighted(1.0)},
}


class AlgorithmConfig(Section):
    """The loss. `name` fills in what is left out; the defaults below are those of `grpo`."""

    name: str = "grpo"
    """One of `grpo`, `dr_grpo`, `dapo`, `rloo`, `reinforce_pp`, `gspo`, `cispo`, `aipo`, `decoupled_ppo`, `tba`,
    `distill`, or the name of an algorithm of an installed package."""
    advantage: Advantage = Advantage.GROUP_STD
    """`group_std`: (r - mean) / std of the group. `group_mean`: without the division. `leave_one_out`: against the
    mean of the others. `batch_std`: (r - mean) / std over the trained tokens of the whole step, which has all
    groups, whatever `rollout.without_signal` says. `none`: 0. Where tokens have rewards r is the return of a token
    (the rewards from there on), and mean and std of a group are over its tokens, each response counting once."""
    overlong_tokens: Annotated[int, Field(ge=1)] | None = None
    """The last so many of `rollout.sampling.max_new_tokens` lower the reward that advantages are made of: by 0
    before them, 1 at the cap, linear between (DAPO's overlong shaping). Whether a group has signal is a matter of
    its rewards alone. None: they cost nothing."""
    truncated: Truncated = Truncated.TRAIN
    """Responses that `rollout.sampling.max_new_tokens` or `rollout.max_seconds` has cut: `train` on them, or
    `mask` them from the loss (DAPO's overlong filtering). Masked ones count for the advantages of their group and
    are consumed with weight 0."""
    objective: Objective = Objective.CLIP
    """`clip`: PPO's, token by token. `sequence_clip`: one ratio for a whole response. `weighted`: the
    log-probability times a truncated importance weight, which has a gradient everywhere. `balance`: minus the
    squared imbalance of a response, `log Z + log (policy / reference) - reward / beta`; it needs no importance
    weights, however old the response is. log Z of a prompt is minus the mean imbalance of its responses in the
    step, for which there is one more forward pass."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """For `balance`: the policy it leads to is the reference times exp(reward / beta)."""
    clip_low: Share = 0.2
    """Ratios below 1 - clip_low are clipped; 1: none are."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """Ratios above 1 + clip_high are clipped."""
    importance_cap: Annotated[float, Field(gt=1)] | None = None
    """For `clip`: ratios are cut here where the clip does not act (bad tokens that became likelier); at least
    1 + clip_high. None: nowhere, as PPO has it."""
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN
    """`sequence_mean`: mean over the tokens of each response, then over responses. `token_mean`: over tokens.
    `constant`: sum over tokens divided by `rollout.sampling.max_new_tokens`, then mean over responses."""
    proximal: Proximal = Proximal.BEHAVIOUR
    """What ratios are against. `behaviour`: the policy that drew the token. `recompute`: the learner's own at the
    start of the step. `interpolate`: between the two, log-linear in the token's staleness,
    which counts learner steps."""
    correction: Correction = Correction.NONE
    """Weight of a token: the ratio of proximal to behaviour policy, cut at `correction_high` (`tis`), or 0 above
    it (`mis`), or 0 outside both bounds (`icepop`). Or 0 for whole responses, by their mean ratio of new to
    behaviour policy: outside both bounds (`sequence_mask`), or with a negative advantage below
    1 / `correction_high` (`negative_mask`)."""
    correction_low: Annotated[float, Field(ge=0)] = 0.5
    """Lower bound of `icepop` and `sequence_mask`."""
    correction_high: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of `correction`."""
    updates_per_step: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps on the batch of a learner step, each on its own part of the microbatches; at most as many as
    a rank has of these. `recompute` differs from the policy itself only after the first of them."""
    kl_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the divergence from the reference model, which is loaded if this is above 0, or for `balance`."""
    kl_estimator: Divergence = Divergence.K3
    """`k3`, `k2`: added to the loss, token by token. `k1`: taken off the advantage, as its gradient has mean 0."""
    reference: Path | None = None
    """Hugging Face folder of the reference model; None: the model that RL begins with. It stays as it is."""
    reference_pass: ReferencePass = ReferencePass.LEARNER
    """`learner`: each rank has the reference beside the policy and asks it at the start of a step. `stage`: a
    process of its own, on a device of the learner's kind, has it and takes up each trajectory when it is finished,
    while others are generated and trained on."""
    teacher_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """The advantage of a token for each nat by which the teacher finds it likelier. A reward function of yours
    returns the column `teacher_logprobs`: the teacher's log-probability of each token, at the same temperature and
    over the whole vocabulary."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """Inputs of the loss for each token besides those that every loss has; a subclass adds its own."""
        teacher = Column(name=TEACHER_LOGPROBS)
        reference = Column(name=REFERENCE_LOGPROBS, source=Source.REFERENCE)
        compares = self.kl_coef > 0 or self.objective is Objective.BALANCE
        return (*((teacher,) if self.teacher_coef > 0 else ()), *((reference,) if compares else ()))

    @property
    def scored_columns(self) -> tuple[Column, ...]:
        """Columns that the reward function must return."""
        return tuple(column for column in self.columns if column.source is Source.SCORER)

    @property
    def packed_columns(self) -> tuple[Column, ...]:
        """Columns that trajectories have when they are packed: all but those the learner computes itself."""
        return self.columns if self.refers_in_stage else self.scored_columns

    @property
    def refers(self) -> bool:
        """True where there is a reference model."""
        return any(column.source is Source.REFERENCE for column in self.columns)

    @property
    def refers_in_stage(self) -> bool:
        """True where the reference model has a process of its own."""
        return self.reference_pass is ReferencePass.STAGE

    @property
    def learns_from_equal_rewards(self) -> bool:
        """True where a group whose rewards are all equal teaches something; a subclass may say so too."""
        return self.teacher_coef > 0 or self.objective is Objective.BALANCE

    @property
    def normalises_step(self) -> bool:
        """True where advantages are normalised over a whole step, so that no group may be left out of it."""
        return self.advantage is Advantage.BATCH_STD

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return PRESETS.get(str(given.get("name", "grpo")), {}) | given

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_columns()
        self._check_ratios()
        if self.objective is Objective.BALANCE:
            self._check_balance()
        self._check_teaching()
        if self.refers_in_stage and not self.refers:
            raise ConfigError(
                f"algorithm.reference_pass=stage: there is no reference model with algorithm.kl_coef=0 and"
                f" algorithm.objective={self.objective}; set kl_coef above 0, or leave reference_pass out"
            )
        return self

    def _check_columns(self) -> None:
        seen = set[str]()
        for column in self.columns:
            if column.name in seen:
                raise ConfigError(
                    f"algorithm.name={self.name}: declares column {column.name!r} twice; mend that package"
                )
            seen.add(column.name)
            if column.source is Source.REFERENCE and column.name != REFERENCE_LOGPROBS:
                raise ConfigError(
                    f"algorithm.name={self.name}: column {column.name!r} cannot come from the reference model,"
                    f" which gives {REFERENCE_LOGPROBS!r} alone; mend that package"
                )

    def _check_ratios(self) -> None:
        if self.importance_cap is not None and self.importance_cap < 1 + self.clip_high:
            raise ConfigError(
                f"algorithm.importance_cap={self.importance_cap} is below 1 + algorithm.clip_high ="
                f" {1 + self.clip_high}, so the clip would never act; raise it"
            )
        if self.correction in WEIGHTS and self.proximal is Proximal.BEHAVIOUR:
            raise ConfigError(
                f"algorithm.correction={self.correction}: ratios against the behaviour policy correct by"
                " themselves; set algorithm.proximal to recompute or interpolate"
            )
        if self.correction in BOUNDED and self.correction_low >= self.correction_high:
            raise ConfigError(
                f"algorithm.correction_low={self.correction_low} is not below algorithm.correction_high ="
                f" {self.correction_high}; lower it"
            )

    def _check_balance(self) -> None:
        if self.aggregation is not Aggregation.SEQUENCE_MEAN:
            raise ConfigError(
                f"algorithm.aggregation={self.aggregation}: objective=balance weighs whole responses; set it to"
                " sequence_mean"
            )
        if self.correction is not Correction.NONE:
            raise ConfigError(
                f"algorithm.correction={self.correction}: objective=balance needs no correction; set it to none"
            )
        if self.teacher_coef or (self.kl_coef and self.kl_estimator is Divergence.K1):
            raise ConfigError(
                f"algorithm.teacher_coef={self.teacher_coef} kl_estimator={self.kl_estimator}: objective=balance"
                " has no advantages that they could change; set teacher_coef to 0, and k2 or k3"
            )

    def _check_teaching(self) -> None:
        if self.advantage is Advantage.NONE and self.overlong_tokens is not None:
            raise ConfigError(
                f"algorithm.overlong_tokens={self.overlong_tokens} has no advantages to change with"
                " algorithm.advantage=none; leave it out"
            )
        learns = self.advantage is not Advantage.NONE or self.learns_from_equal_rewards or self.refers
        if not learns:
            raise ConfigError(
                "algorithm.advantage=none teaches nothing by itself; choose another, or set teacher_coef"
            )
        if self.teacher_coef > 0 and self.advantage is not Advantage.NONE:
            raise ConfigError(
                f"algorithm.advantage={self.advantage}: with teacher_coef the scores are the teacher's"
                " log-probabilities, and no rewards; set it to none"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An algorithm as the registry has it, e.g. `Algorithm(settings=HintedConfig, objective=hinted)`.

    `settings` validates the section `algorithm` and names the columns of the loss. `objective` takes
    `learner.losses.objectives.Terms` and the settings and gives [N], what each trained token adds to the sum that
    is maximised; without one it is the built-in objective that the settings name. It is called in the learner
    alone, and may import torch when it is called.
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
"""A section that is raw until the model of its algorithm has validated it; JSON keeps all of its fields."""


def check_overlong(algorithm: AlgorithmConfig, sampling: SamplingConfig) -> None:
    """Refuse more shaped tokens than a response can have."""
    tokens, cap = algorithm.overlong_tokens, sampling.max_new_tokens
    if tokens is not None and tokens > cap:
        raise ConfigError(
            f"algorithm.overlong_tokens={tokens} is more than rollout.sampling.max_new_tokens={cap}; lower it"
        )


def check_reference(algorithm: AlgorithmConfig, model: ModelConfig, warm_start: WarmStartConfig | None) -> None:
    """Refuse random weights as the reference."""
    random_start = model.from_scratch and warm_start is None
    if algorithm.refers and algorithm.reference is None and random_start:
        raise ConfigError(
            f"algorithm.name={algorithm.name} kl_coef={algorithm.kl_coef}: the policy is compared with its start,"
            " which model.from_scratch draws at random; name algorithm.reference"
        )


def check_teaching(algorithm: AlgorithmConfig, rollout: RolloutConfig, reward: RewardConfig) -> None:
    """Refuse rewards, and a use of them, that the algorithm does not learn from."""
    if algorithm.learns_from_equal_rewards and rollout.without_signal is not WithoutSignal.TRAIN:
        raise ConfigError(
            f"rollout.without_signal={rollout.without_signal} drops groups whose rewards are equal, which"
            f" algorithm.name={algorithm.name} learns from; set it to train"
        )
    needed = ", ".join(column.name for column in algorithm.scored_columns)
    for terms in reward.rules.values():
        if needed and not any(term.gives_columns for term in terms):
            raise ConfigError(
                f"reward.use={', '.join(term.title for term in terms)} gives one number, and"
                f" algorithm.name={algorithm.name} needs {needed} of each token; name a function of yours that"
                " returns a Reward with them"
            )
    if algorithm.teacher_coef > 0 and rollout.sampling.cuts_vocabulary:
        raise ConfigError(
            f"algorithm.teacher_coef={algorithm.teacher_coef} compares with a teacher over the whole vocabulary,"
            " which rollout.sampling cuts; leave top_k, top_p and min_p out"
        )
