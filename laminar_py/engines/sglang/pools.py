"""Servers of `reward.servers`: their launch, and the checks before it. Called by the pools' processes, `laminar
reward` and the checks before a run.
"""

from dataclasses import dataclass
from pathlib import Path

from laminar_py.config.cluster import Device
from laminar_py.config.reward import RewardConfig, ServerPoolConfig
from laminar_py.config.section import ConfigError
from laminar_py.engines.model_sizes import served_dtype
from laminar_py.engines.sglang.backend import check_interpreter
from laminar_py.engines.sglang.settings import (
    CPU_FLAGS,
    LOOPBACK,
    RESERVED,
    Flag,
    check_flags,
    flag_name,
    launch_command,
    server_environment,
)


@dataclass(frozen=True, kw_only=True)
class PoolServerSpec:
    """A server of a pool to launch, with the weights and tokenizer in the model's folder.

    Raises `ConfigError` for flags that the run sets itself.
    """

    pool: str
    settings: ServerPoolConfig
    log: Path
    host: str = LOOPBACK
    first_gpu: int = 0  # index among the GPUs that its process sees

    def __post_init__(self) -> None:
        """Raise `ConfigError` for settings that can never start."""
        field = f"reward.servers.{self.pool}"
        remedies = dict.fromkeys(RESERVED, "the run chooses it; leave it out")
        remedies |= dict.fromkeys(("model-path", "model"), f"set {field}.model")
        remedies |= dict.fromkeys(("tp-size", "tensor-parallel-size", "device"), f"set {field}.gpus")
        remedies["served-model-name"] = "the run chooses it; leave it out"
        del remedies["dtype"]
        check_flags(self.settings.flags, field=f"{field}.flags", reserved=remedies)
        if self.device is Device.CPU and "max-total-tokens" not in map(flag_name, self.settings.flags):
            raise ConfigError(f"{field}.flags.max-total-tokens=None: on a CPU it would take all memory; set it")

    @property
    def model_dir(self) -> Path:
        """See `ServerLaunch.model_dir`."""
        return self.settings.model

    @property
    def device(self) -> Device:
        """Device of the server."""
        return Device.CUDA if self.settings.gpus else Device.CPU

    @property
    def start_limit(self) -> tuple[str, float]:
        """See `ServerLaunch.start_limit`."""
        return f"reward.servers.{self.pool}.start_timeout_s", self.settings.start_timeout_s

    def command(self, port: int) -> list[str]:
        """Command line of the server on `port`, without the key."""
        flags: dict[str, Flag] = {
            "model-path": str(self.model_dir),
            "served-model-name": self.pool,
            "dtype": served_dtype(self.model_dir, field=f"reward.servers.{self.pool}.model"),
            "device": self.device.value,
            "tp-size": max(1, self.settings.gpus),
            "skip-server-warmup": True,
            "log-level-http": "warning",
            "host": self.host,
            "port": port,
        }
        if self.first_gpu:
            flags["base-gpu-id"] = self.first_gpu
        if self.device is Device.CPU:
            flags |= CPU_FLAGS
        return launch_command(self.settings.interpreter, flags, self.settings.flags)

    def environment(self) -> dict[str, str]:
        """Environment variables of the server: the variables of this process and SGLang's own."""
        return server_environment(self.device)


def check_pool(reward: RewardConfig, pool: str) -> None:
    """Raise `ConfigError` if this host cannot start the servers of `pool`."""
    settings, field = reward.servers[pool], f"reward.servers.{pool}"
    if not (settings.model / "config.json").is_file():
        raise ConfigError(f"{field}.model={settings.model}: no config.json in it; name a Hugging Face folder")
    PoolServerSpec(pool=pool, settings=settings, log=Path())
    check_interpreter(settings.interpreter, field=f"{field}.python")
