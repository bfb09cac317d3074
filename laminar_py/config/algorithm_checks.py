"""Checks of what an algorithm needs of the rest of a config: a reference, rewards that teach, room for shaping."""

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.model import ModelConfig, WarmStartConfig
from laminar_py.config.reward import RewardConfig
from laminar_py.config.rollout import RolloutConfig, SamplingConfig, WithoutSignal
from laminar_py.config.section import ConfigError


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
