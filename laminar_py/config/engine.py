"""Settings of the inference engines."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_py.config.cluster import Device
from laminar_py.config.section import Count, Seconds, Section


class EngineKind(StrEnum):
    """What generates."""

    LOCAL = "local"
    SGLANG = "sglang"


class EngineConfig(Section):
    """What generates: the embedded engine, or SGLang servers that the run launches or attaches to."""

    kind: EngineKind = EngineKind.LOCAL
    """`local`: the embedded engine, in the replica's process. `sglang`: one SGLang server per replica."""
    urls: tuple[str, ...] = ()
    """Servers that are already running, one per replica, e.g. `[http://10.0.0.5:30000]`; none: launch them. They
    must see `relay.shm` under the same path."""
    api_key_env: str = "SGLANG_API_KEY"
    """Environment variable with the key of the servers in `urls`; launched ones get a key of their own. A server
    beyond loopback is refused without one."""
    python: Path | None = None
    """Interpreter of the environment that has SGLang; default: the run's own."""
    device: Device = Device.CUDA
    """What launched servers run on."""
    tensor_parallel: Count = 1
    """GPUs of one launched server."""
    flags: dict[str, str | int | float | bool | tuple[str | int | float, ...]] = Field(default={})
    """Any other flag of `sglang.launch_server`, without its dashes, e.g. `mem-fraction-static: 0.85`; `true` for
    one that takes no value, a list for one that takes several."""
    start_timeout_s: Seconds = 900.0
    """Longest start of a launched server."""
    stall_timeout_s: Seconds = 60.0
    """A server that has requests and sends no token, or leaves a call unanswered, for so long is lost."""
    stream_interval: Count = 8
    """Tokens in one message of a stream of a launched server: more cost less CPU, fewer tell sooner."""
    verify_every: Annotated[int, Field(ge=0)] = 20
    """The server's own tensors are hashed after its first load and once in so many versions, and must agree among
    replicas that hash the same version; 0: never."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError(
                f"rollout.engine.urls={','.join(self.urls)}: a server is named twice, and each replica has its own"
                " weights; name one for each"
            )
        if self.kind is EngineKind.LOCAL and self.urls:
            raise ValueError(
                f"rollout.engine.urls={','.join(self.urls)}: these are SGLang servers; set"
                " rollout.engine.kind=sglang"
            )
        if self.device is Device.CPU and self.tensor_parallel > 1:
            raise ValueError(
                f"rollout.engine.tensor_parallel={self.tensor_parallel} needs GPUs; set"
                " rollout.engine.device=cuda, or tensor_parallel to 1"
            )
        return self
