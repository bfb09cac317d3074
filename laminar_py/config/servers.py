"""Settings of servers that a run launches for terms of its reward: a judge's, a process reward model's."""

import sys
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import Field

from laminar_py.config.section import Count, Seconds, Section

ServerFlag: TypeAlias = str | int | float | bool | tuple[str | int | float, ...]
PoolName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class ServerPoolConfig(Section):
    """A pool of SGLang servers of one model, which the run launches, watches and starts anew; a term names it as
    its `servers`, e.g. `{judge: {model: /models/judge, count: 2}}`. They have keys of their own."""

    model: Path
    """Hugging Face folder of the model, the same on every node."""
    count: Count = 1
    """Servers."""
    gpus: Annotated[int, Field(ge=0)] = 1
    """GPUs of each, on one node; 0: on a CPU."""
    python: Path | None = None
    """Interpreter of the environment that has SGLang; default: the run's own."""
    flags: dict[str, ServerFlag] = {}  # noqa: RUF012 - pydantic copies it
    """Any other flag of `sglang.launch_server`, without its dashes, e.g. `mem-fraction-static: 0.85`; `true` for
    one that takes no value, a list for one that takes several."""
    start_timeout_s: Seconds = 900.0
    """Longest start of a server."""

    @property
    def interpreter(self) -> Path:
        """Interpreter that launches servers, on every host that has some."""
        return self.python or Path(sys.executable)


def server_name(pool: str, index: int) -> str:
    """Name of a server as a part of the run, e.g. `server-judge-0`."""
    return f"server-{pool}-{index}"
