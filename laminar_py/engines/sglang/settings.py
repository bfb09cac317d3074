"""Settings of `rollout.engine` for `kind: sglang`, and the flags and environment of each launched server. Pure.

The backend reads the settings of a run. The launches in `server` and `pools` build commands from the flags.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from laminar_py.config.cluster import Device
from laminar_py.config.engine import EngineConfig
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError, Count, Seconds

KEY_ENV = "SGLANG_API_KEY"
LOOPBACK = "127.0.0.1"
Flag = str | int | float | bool | Sequence[str | int | float]
NO_FLAGS: Mapping[str, Flag] = {}
_ALONE = "a server is one replica on one node; set rollout.replicas or rollout.engine.tensor_parallel"
RESERVED = {  # every spelling of a flag -> remedy
    **dict.fromkeys(("host", "port", "api-key", "admin-api-key", "config"), "the run chooses it; leave it out"),
    **dict.fromkeys(("model-path", "model"), "set model.path"),
    **dict.fromkeys(("tp-size", "tensor-parallel-size"), "set rollout.engine.tensor_parallel"),
    **dict.fromkeys(("dp-size", "data-parallel-size", "pp-size", "pipeline-parallel-size"), _ALONE),
    **dict.fromkeys(("nnodes", "node-rank"), _ALONE),
    **dict.fromkeys(("base-gpu-id", "gpu-id-step"), "the cluster chooses the GPUs; leave it out"),
    "device": "set rollout.engine.device",
    "dtype": "set dtype in the config.json of model.path",
}
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # the spare positions may lie beyond the model's last
}
_CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
CPU_FLAGS: dict[str, Flag] = {
    "sleep-on-idle": True,  # else an idle server keeps a core busy
    "attention-backend": "torch_native",
    "lora-backend": "torch_native",
    "cuda-graph-backend-decode": "disabled",
    "cuda-graph-backend-prefill": "disabled",
}


class SGLangConfig(EngineConfig):
    """SGLang servers, which the run launches or attaches to."""

    urls: tuple[str, ...] = ()
    """Servers that are already running, one per replica, e.g. `[http://10.0.0.5:30000]`; none: launch them. They
    must see `relay.shm` under the same path. Their key is in the environment variable SGLANG_API_KEY; without one
    a server beyond loopback is refused. Launched servers get a key of their own."""
    python: Path | None = None
    """Interpreter of the environment that has SGLang; default: the run's own."""
    device: Device = Device.CUDA
    """Device of launched servers."""
    tensor_parallel: Count = 1
    """GPUs of one launched server."""
    flags: dict[str, str | int | float | bool | tuple[str | int | float, ...]] = Field(default={})
    """Any other flag of `sglang.launch_server`, without its dashes, e.g. `mem-fraction-static: 0.85`; `true` for
    a flag without a value, a list for a flag with several values."""
    start_timeout_s: Seconds = 900.0
    """Longest start of a launched server."""
    stall_timeout_s: Seconds = 60.0
    """A server that has requests and sends no token, or leaves a call unanswered, for so long is lost."""
    load_timeout_s: Seconds = 600.0
    """A server that loads a version of the weights, or hashes it, for longer than so many seconds is lost."""
    stream_interval: Count = 8
    """Tokens in one stream message of a launched server.

    More tokens cost less CPU, fewer tokens arrive sooner.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        for url in self.urls:
            if not is_address(url):
                raise ConfigError(
                    f"rollout.engine.urls={url}: no address of a server; write one such as http://10.0.0.5:30000"
                )
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ConfigError(
                f"rollout.engine.urls={','.join(self.urls)}: a server is named twice, and each replica has its own"
                " weights; name one for each"
            )
        if self.device is Device.CPU and self.tensor_parallel > 1:
            raise ConfigError(
                f"rollout.engine.tensor_parallel={self.tensor_parallel} needs GPUs; set"
                " rollout.engine.device=cuda, or tensor_parallel to 1"
            )
        return self

    @property
    def interpreter(self) -> Path:
        """Interpreter that launches servers, on every host that has replicas."""
        return self.python or Path(sys.executable)

    @property
    def gpus(self) -> int:
        """See `EngineConfig.gpus`."""
        return self.tensor_parallel if self.device is Device.CUDA else 0

    @property
    def static_share(self) -> float:
        """See `EngineConfig.static_share`; SGLang's own choice, where no flag names it, is near the default."""
        given = {name.replace("_", "-"): value for name, value in self.flags.items()}.get("mem-fraction-static")
        return float(given) if isinstance(given, (int, float, str)) else super().static_share

    @property
    def servers(self) -> tuple[str, ...]:
        """See `EngineConfig.servers`."""
        return self.urls

    @property
    def hosts(self) -> tuple[str, ...]:
        """See `EngineConfig.hosts`."""
        return tuple(urlsplit(url).hostname or "" for url in self.urls)

    @property
    def placed_by(self) -> str:
        """See `EngineConfig.placed_by`."""
        return "rollout.engine.urls" if self.urls else "rollout.engine.tensor_parallel"

    @property
    def start_limit_s(self) -> float:
        """See `EngineConfig.start_limit_s`."""
        return self.start_timeout_s

    @property
    def secret_env(self) -> str:
        """See `EngineConfig.secret_env`."""
        return KEY_ENV

    def remedies(self) -> tuple[tuple[str, str, str], ...]:
        """See `EngineConfig.remedies`."""
        change = f"{self.tensor_parallel} -> {2 * self.tensor_parallel}"
        return (
            ("tensor_parallel", change, "faster replicas in place of more"),
            ("flags", "speculative-algorithm", "several tokens for one pass"),
        )


def section_of(config: RunConfig) -> SGLangConfig:
    """Return the section `rollout.engine` of a run on SGLang."""
    section = config.rollout.engine
    assert isinstance(section, SGLangConfig), section
    return section


def is_address(url: str) -> bool:
    """True for an http or https URL with a host, and a numeric port if it has one."""
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
    return named and parts.scheme in ("http", "https")


def check_flags(flags: Mapping[str, Flag], *, field: str, reserved: Mapping[str, str]) -> None:
    """Raise `ConfigError`, with its remedy, for a flag in `reserved`, since the run sets it itself."""
    for name, value in flags.items():
        for one, remedy in reserved.items():
            if one.startswith(flag_name(name)):  # the server accepts prefixes of flag names
                raise ConfigError(f"{field}.{name}={value}: {remedy}")


def launch_command(python: Path, flags: Mapping[str, Flag], given: Mapping[str, Flag]) -> list[str]:
    """Build the command with `flags`, overridden by the user's flags `given`; False removes a flag."""
    command = [str(python), "-m", "sglang.launch_server"]
    for name, value in {**flags, **{flag_name(name): value for name, value in given.items()}}.items():
        if value is not False:
            command += [f"--{name}", *_words_of(value)]
    return command


def server_environment(device: Device) -> dict[str, str]:
    """Environment variables of this process and of a server on `device`."""
    special = _CPU_ENVIRONMENT if device is Device.CPU else {}
    return {**os.environ, **_ENVIRONMENT, **special}


def flag_name(name: str) -> str:
    """Name of a flag as the server spells it, e.g. "max-total-tokens"."""
    return name.lstrip("-").replace("_", "-")


def _words_of(value: Flag) -> list[str]:
    if value is True:
        return []
    return [str(value)] if isinstance(value, str | int | float) else [str(item) for item in value]
