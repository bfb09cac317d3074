"""Settings of held-out evaluation."""

from typing import Annotated, Self, TypeAlias

import msgspec
from pydantic import BeforeValidator, Field, model_validator

from laminar_py.config.data import SourceConfig, read_source
from laminar_py.config.rollout import RolloutConfig
from laminar_py.config.section import ConfigError, Count, Seconds, Section, Share
from laminar_py.records.engine import SamplingParams
from laminar_py.records.pieces import Recording

SetName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class EvalSetConfig(SourceConfig):
    """Problems to evaluate on; none of them may occur in `data.train`. `reward.by_set` may give them a reward of
    their own."""

    samples: Count = 1
    """Answers to each problem (k of avg@k, pass@k and maj@k); more than one needs a `temperature` above 0."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Divides the logits; 0 is greedy."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Keep the k most probable tokens; 0 keeps all. Default: `rollout.sampling.top_k`."""
    top_p: Share | None = None
    """Keep the smallest set of tokens with this probability. Default: `rollout.sampling.top_p`."""
    max_new_tokens: Count | None = None
    """Cap on the tokens of an answer. Default: `rollout.sampling.max_new_tokens`."""
    every_steps: Count | None = None
    """Learner steps between two evaluations on this set. Default: `eval.every_steps`."""

    def sampling(self, run: SamplingParams) -> SamplingParams:
        """Return the sampling parameters of an answer; settings that are None come from `run`."""
        overrides = {"top_k": self.top_k, "top_p": self.top_p, "max_new_tokens": self.max_new_tokens}
        changes = {name: value for name, value in overrides.items() if value is not None}
        return msgspec.structs.replace(run, temperature=self.temperature, **changes)


AnyEvalSet: TypeAlias = Annotated[EvalSetConfig, BeforeValidator(read_source)]


class EvalConfig(Section):
    """Evaluation on held-out problems before, during and after RL; each set is a pass of its own."""

    sets: dict[SetName, AnyEvalSet] = {}  # noqa: RUF012 - pydantic copies it
    """Sets by name, e.g. `{heldout: heldout.jsonl}`. Views with room for one set show the first."""
    every_steps: Count | None = None
    """Learner steps between two evaluations during RL; None: only before and after."""
    at_seconds: tuple[Seconds, ...] = ()
    """Seconds of RL, ascending; at each, the newest weights that replicas serve are evaluated. With `deferred`,
    exactly the weights of that time are evaluated."""
    deferred: bool = False
    """Keep the weights in shared memory and evaluate them after RL instead of during it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, settings in self.sets.items():
            if settings.samples > 1 and settings.temperature == 0:
                raise ConfigError(
                    f"eval.sets.{name}.temperature=0: all samples={settings.samples} answers are equal; set it"
                    " above 0, or samples to 1"
                )
        return self

    def sampling_by_set(self, run: SamplingParams) -> dict[str, str]:
        """Return set -> JSON of (number of answers to a problem, their sampling parameters)."""
        return {
            name: msgspec.json.encode((settings.samples, settings.sampling(run))).decode()
            for name, settings in self.sets.items()
        }

    def intervals(self) -> dict[str, int]:
        """Return set -> learner steps between two evaluations; sets without evaluations during RL are missing."""
        every = {name: settings.every_steps or self.every_steps for name, settings in self.sets.items()}
        return {name: steps for name, steps in every.items() if steps is not None}


def check_evaluation(evaluation: EvalConfig, rollout: RolloutConfig) -> None:
    """Raise `ConfigError` for a set whose answers do not fit into `max_len` or into recorded sampling masks."""
    run = rollout.sampling.params()
    for name, settings in evaluation.sets.items():
        sampling = settings.sampling(run)
        if sampling.max_new_tokens >= rollout.max_len:
            raise ConfigError(
                f"eval.sets.{name}.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in"
                f" rollout.max_len={rollout.max_len}; raise max_len or lower max_new_tokens"
            )
        whole = not sampling.top_k and sampling.top_p == 1 and not sampling.min_p
        wider = run.top_k > 0 and not 0 < sampling.top_k <= run.top_k
        if Recording.SAMPLING_MASK in rollout.record and (whole or wider):
            raise ConfigError(
                f"eval.sets.{name} samples top_k={sampling.top_k}, top_p={sampling.top_p:g}, but"
                f" rollout.record=sampling_mask has room for rollout.sampling.top_k={run.top_k} tokens (0: only"
                f" top_p or min_p cuts); set the set's top_k or top_p to the run's, or record no sampling_mask"
            )
