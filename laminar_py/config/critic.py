"""Settings of a critic: the value model of PPO, and generalised advantage estimation from its values."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from laminar_py.config.learner import LearnerConfig
from laminar_py.config.section import Section, Share

Lambda = Annotated[float, Field(ge=0, le=1)]


class Action(StrEnum):
    """Part of a response that counts as one action; see `CriticConfig.action`."""

    TOKEN = "token"
    TURN = "turn"


class CriticConfig(Section):
    """A value model inside the learner. It begins as the model that RL begins with, with one number in place of
    the output embedding, which is 0 at first. It takes the memory of a second policy with its optimizer, and about
    four thirds of a policy's work in a step. With `learner.lora` it trains adapters of its own and the head."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Learning rate of its AdamW, without a warm-up. `learner.betas`, `weight_decay`, `grad_clip` and `decay` hold
    for it, too. It must follow a policy that changes, so its rate is above the policy's, about ten times for
    billions of parameters."""
    action: Action = Action.TOKEN
    """`token`: each sampled token is an action, and the first token of a turn follows the last token of the turn
    before. `turn`: each turn of the model is one action, whose tokens share an advantage; `gamma` and both lambdas
    count turns. Tokens of an environment are no actions."""
    gamma: Share = 1.0
    """Discount of rewards for each action until they come."""
    policy_lambda: Lambda = 0.95
    """Weight of later errors of the value in an advantage, for each action. At 1 rewards alone count, and the
    value is a baseline; lower numbers trust the critic more and have less variance."""
    value_lambda: Lambda = 1.0
    """The same in the number to which the critic regresses: at 1 it is the discounted reward, without any bias by
    the critic's own mistakes (VC-PPO, Yuan et al. 2025)."""
    clip: Annotated[float, Field(gt=0)] | None = 0.2
    """A value that an update moves further than this from the value at the start of the step has no gradient, as
    long as its error is the larger one. It acts from the second update of a step on. None: no clip."""

    def optimizer(self, learner: LearnerConfig) -> LearnerConfig:
        """Return the settings of its optimizer beside a policy's `learner`."""
        return learner.model_copy(update={"lr": self.lr, "warmup_steps": 0})
