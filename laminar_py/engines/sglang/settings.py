"""Settings of `rollout.engine` for `kind: sglang`. The controller, every node and the backend read them."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self, TypeAlias

from pydantic import Field, model_validator

from laminar_py.config.cluster import Device
from laminar_py.config.engine import QUANTIZATION, EngineConfig, Speculation
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError, Count, Seconds, is_address
from laminar_py.records.pieces import Recording

KEY_ENV = "SGLANG_API_KEY"
OFF_CUDA = "off CUDA SGLang takes the most probable token at any temperature; leave it out"
Flag = str | int | float | bool | Sequence[str | int | float]
Flags: TypeAlias = Mapping[str, Flag]  # by name, without dashes


class SGLangConfig(EngineConfig):
    """SGLang servers, which the run launches or attaches to."""

    verify_every: Annotated[int, Field(ge=0)] = 20
    """As for every backend; a server stands still while it hashes."""
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
    """Longest start of a launched server. Also the limit until a server's first token, in place of
    `stall_timeout_s`: kernels compile in its first request."""
    stall_timeout_s: Seconds = 60.0
    """A server that has requests and sends no token, or leaves a call unanswered, for so long is lost; before its
    first token after `start_timeout_s`."""
    load_timeout_s: Seconds = 600.0
    """A server that loads a version of the weights, or hashes it, for longer than so many seconds is lost."""
    stream_interval: Count = 8
    """Tokens in one stream message of a launched server.

    More tokens cost less CPU, fewer tokens arrive sooner.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse URLs that are no addresses or are named twice, and tensor parallelism on CPUs."""
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
        if self.urls and self.speculation is not Speculation.NONE:
            raise ConfigError(
                f"rollout.engine.speculation={self.speculation}: a running server chose at its start; leave it out"
            )
        if self.quantizes and (self.urls or self.device is Device.CPU):
            fault = "a running server chose at its start" if self.urls else "SGLang rounds weights on CUDA only"
            raise ConfigError(f"{QUANTIZATION}={self.quantization}: {fault}; leave it out")
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
        """GPUs of one server; 0 on a CPU."""
        return self.tensor_parallel if self.device is Device.CUDA else 0

    @property
    def static_share(self) -> float:
        """Share of each GPU's memory for weights and KV cache: `mem-fraction-static`, or else the default."""
        fraction = {flag_name(name): value for name, value in self.flags.items()}.get("mem-fraction-static")
        return float(fraction) if isinstance(fraction, (int, float, str)) else super().static_share

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of running servers, one for each replica; empty if the run launches servers."""
        return self.urls

    @property
    def placed_by(self) -> str:
        """Setting that determines `gpus` or `hosts`, for messages."""
        return "rollout.engine.urls" if self.urls else "rollout.engine.tensor_parallel"

    @property
    def start_limit_s(self) -> float:
        """Longest start of a server, seconds."""
        return self.start_timeout_s

    @property
    def secret_env(self) -> str:
        """Environment variable of the controller with the key of running servers."""
        return KEY_ENV

    def remedies(self) -> tuple[tuple[str, str, str], ...]:
        """Settings to change where generation limits the run: (setting, change, reason)."""
        change = f"{self.tensor_parallel} -> {2 * self.tensor_parallel}"
        return (("tensor_parallel", change, "faster replicas in place of more"),)


def flag_name(name: str) -> str:
    """Name of a flag as the server spells it, e.g. "max-total-tokens"."""
    return name.lstrip("-").replace("_", "-")


def algorithm_in(flags: Flags) -> str:
    """Return the speculative algorithm that flags name, also by a prefix of the flag; "NONE" without one."""
    named = [value for name, value in flags.items() if "speculative-algorithm".startswith(flag_name(name))]
    return str(named[-1] or None).upper() if named else "NONE"


def speculation_fault(algorithm: str, *, on_cuda: bool, record: Sequence[Recording]) -> str | None:
    """Say why a server whose weights change cannot speculate by `algorithm`, with a remedy; None if it can."""
    if algorithm == "NONE":
        return None
    if algorithm != "NGRAM":
        return "drafts with weights that no version of the run trains; set it to NGRAM, or leave it out"
    if not on_cuda:
        return OFF_CUDA
    return f"records no {record[0]}; leave out one of it and rollout.record" if record else None


def section_of(config: RunConfig) -> SGLangConfig:
    """Return the section `rollout.engine` of a run on SGLang."""
    section = config.rollout.engine
    assert isinstance(section, SGLangConfig), section
    return section
