"""Trajectory-level asynchronous RL post-training of language models: the names that tasks and packages need."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.config.algorithm import Algorithm as Algorithm
    from laminar_py.config.engine import Backend as Backend
    from laminar_py.config.reward import RewardKind as RewardKind
    from laminar_py.environment.protocol import End as End
    from laminar_py.environment.protocol import Environment as Environment
    from laminar_py.environment.protocol import Observation as Observation
    from laminar_py.environment.protocol import Problem as Problem
    from laminar_py.records.scoring import Reward as Reward
    from laminar_py.records.scoring import ScoringRequest as ScoringRequest
    from laminar_py.records.trajectory import Prompt as Prompt
else:
    __getattr__ = public_names(__name__)
