"""Settings and registries. A module for each section is public; here are the names that users need."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.config.algorithm import Advantage as Advantage
    from laminar_py.config.algorithm import AlgorithmConfig as AlgorithmConfig
    from laminar_py.config.cluster import SandboxConfig as SandboxConfig
    from laminar_py.config.engine import EngineConfig as EngineConfig
    from laminar_py.config.environment import EnvironmentConfig as EnvironmentConfig
    from laminar_py.config.environment import EnvironmentHome as EnvironmentHome
    from laminar_py.config.environment import EnvironmentKind as EnvironmentKind
    from laminar_py.config.loading import load_config as load_config
    from laminar_py.config.loading import parse_config as parse_config
    from laminar_py.config.registry import load_from_file as load_from_file
    from laminar_py.config.reward import RewardKind as RewardKind
    from laminar_py.config.reward import TermConfig as TermConfig
    from laminar_py.config.run import RunConfig as RunConfig
    from laminar_py.config.section import ConfigError as ConfigError
    from laminar_py.config.section import Count as Count
    from laminar_py.config.section import Seconds as Seconds
    from laminar_py.config.section import Section as Section
else:
    __getattr__ = public_names(__name__)
