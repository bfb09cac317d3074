"""Launches and owns an SGLang server of a replica or a pool.

Called by the process of a replica or pool, and by tests.

The server lives no longer than its owner: a guard (`guard.py`) between the two ends all processes of the server,
also when the owner is killed (`tests/engines/sglang/test_guard.py`). To restart, call `stop` and make a new
`SGLangServer`.
"""

import asyncio
import json
import os
import re
import secrets
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol, Self

import aiohttp
import psutil

from laminar_py.config.cluster import Device
from laminar_py.config.learner import LoraConfig
from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.engines.model_sizes import served_dtype
from laminar_py.engines.sglang.guard import Order
from laminar_py.engines.sglang.http import headers
from laminar_py.engines.sglang.settings import (
    CPU_FLAGS,
    LOOPBACK,
    RESERVED,
    Flag,
    SGLangConfig,
    check_flags,
    launch_command,
    server_environment,
)
from laminar_py.records.engine import EngineLostError
from laminar_py.records.pieces import Recording

# SGLang reserves the last positions of its context: 6 for a prompt, 2 for a response
SPARE_TOKENS = 8
GUARD_SCRIPT = str(Path(__file__).with_name("guard.py"))
LOOK_S = 0.2
ANSWER_S = 10.0
TAIL_BYTES = 65536
MAX_LORAS = 2  # in one batch: the adapter of new requests, and the adapter of older requests
MASK_TOKENS = 4096  # tokens of a recorded mask by default
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
NUM_PORTS = 8192  # number of ports to choose from
_ERROR = re.compile(r"^([\w.]+(Error|Exception|Interrupt)|.*: error)\b")
_STAMP = re.compile(r"^\[[^\]]*\]\s*")


class ServerLaunch(Protocol):
    """Command, environment and limits of a server to launch."""

    @property
    def model_dir(self) -> Path:
        """Folder of the model."""
        ...

    @property
    def log(self) -> Path:
        """File to which the server's output is appended."""
        ...

    @property
    def host(self) -> str:
        """Address that it listens on."""
        ...

    @property
    def start_limit(self) -> tuple[str, float]:
        """The setting that limits its start, and the seconds."""
        ...

    def command(self, port: int) -> list[str]:
        """Command line of the server on `port`, without the key."""
        ...

    def environment(self) -> dict[str, str]:
        """Environment variables of the server."""
        ...


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """A server for one replica.

    E.g. `ServerSpec(python=python, model_dir=folder, log=log, max_batch=64, max_len=8192)`.

    The server reads only the model's `config.json`; weights come by `/update_weights_from_disk` before any prompt.
    With `lora` it also loads the weights in the folder, the base of later adapters.
    """

    python: Path  # interpreter of the environment that has SGLang
    model_dir: Path
    log: Path  # the server's output is appended
    max_batch: int
    max_len: int  # tokens of prompt and response
    kv_capacity: int | None = None  # tokens; None fills the GPU's memory, and is refused on a CPU
    device: Device = Device.CUDA
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    stream_interval: int = 1  # tokens in one message of a stream
    record: tuple[Recording, ...] = ()
    lora: LoraConfig | None = None
    mask_tokens: int = 0  # tokens of a recorded sampling mask: top_k
    flags: Mapping[str, Flag] = field(
        default_factory=dict
    )  # of the user, who overrides ours; False removes a flag
    start_timeout_s: float = 900.0
    host: str = LOOPBACK

    @classmethod
    def for_replica(cls, config: RunConfig, section: SGLangConfig, *, model_dir: Path, log: Path) -> Self:
        """Build the spec of the server that a run launches for one replica."""
        rollout = config.rollout
        chosen = rollout.kv_capacity or section.device is Device.CPU
        # with overlap a token is in the pipeline during an in-place load, and gets the new version
        in_place = rollout.on_new_weights is OnNewWeights.IN_PLACE
        exact: dict[str, Flag] = {"disable-overlap-schedule": True} if in_place else {}
        return cls(
            python=section.interpreter,
            model_dir=model_dir,
            log=log,
            max_batch=rollout.max_batch,
            max_len=rollout.max_len,
            kv_capacity=rollout.kv_tokens if chosen else None,
            device=section.device,
            dtype=served_dtype(model_dir),
            tensor_parallel=section.tensor_parallel,
            stream_interval=section.stream_interval,
            record=rollout.record,
            lora=config.learner.lora,
            mask_tokens=rollout.sampling.top_k,
            flags={**exact, **section.flags},
            start_timeout_s=section.start_timeout_s,
        )

    def __post_init__(self) -> None:
        """Raise `ConfigError` for settings that can never start."""
        check_flags(self.flags, field="rollout.engine.flags", reserved=RESERVED)
        if self.device is Device.CPU and self.kv_capacity is None:
            raise ConfigError("rollout.kv_capacity=None: on a CPU it would take all memory; set it")

    @property
    def start_limit(self) -> tuple[str, float]:
        """See `ServerLaunch.start_limit`."""
        return "rollout.engine.start_timeout_s", self.start_timeout_s

    def command(self, port: int) -> list[str]:
        """Command line of the server on `port`, without the key."""
        flags: dict[str, Flag] = {
            "model-path": str(self.model_dir),
            "load-format": "dummy",
            "dtype": self.dtype,
            "device": self.device.value,
            "tp-size": self.tensor_parallel,
            "max-running-requests": self.max_batch,
            "context-length": self.max_len + SPARE_TOKENS,
            "stream-interval": self.stream_interval,
            "incremental-streaming-output": True,
            "skip-tokenizer-init": True,
            "skip-server-warmup": True,
            "enable-return-routed-experts": Recording.ROUTED_EXPERTS in self.record,
            "log-level-http": "warning",
            "host": self.host,
            "port": port,
        }
        if self.kv_capacity is not None:
            flags["max-total-tokens"] = max(self.kv_capacity, self.max_len + SPARE_TOKENS)
        # ties with the last token of top_k make a longer mask, and the server ends a request with a longer mask
        if Recording.SAMPLING_MASK in self.record and 2 * self.mask_tokens > MASK_TOKENS:
            flags["sampling-mask-max-tokens"] = 2 * self.mask_tokens
        if self.lora is not None:
            flags |= _lora_flags(self.lora)
        if self.device is Device.CPU:
            flags |= CPU_FLAGS
        return launch_command(self.python, flags, self.flags)

    def environment(self) -> dict[str, str]:
        """Environment variables of the server: the variables of this process and SGLang's own."""
        return server_environment(self.device)


class SGLangServer:
    """A launched server. Its key goes through a private file, so that no other user of the machine sees it."""

    def __init__(self, spec: ServerLaunch) -> None:
        self.spec = spec
        self.api_key = secrets.token_hex(32)  # hex has no leading dash, which would make it a flag
        self._port = 0
        self._log_start = 0
        self._guard: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """URL of the started server."""
        assert self._port, "not started"
        return f"http://{self.spec.host}:{self._port}"

    @property
    def pid(self) -> int:
        """The process that is the ancestor of server and guard; it ends last."""
        assert self._guard is not None, "not started"
        return self._guard.pid

    async def start(self) -> None:
        """Launch the server and wait until it answers. `EngineLostError` names the reason if it does not."""
        assert self._guard is None, "started before"
        setting, limit_s = self.spec.start_limit
        try:
            await self._launch()
            async with asyncio.timeout(limit_s):
                await self._wait_until_up()
            self._log_start = self.spec.log.stat().st_size  # lines of the start explain no later failure
        except TimeoutError:
            await self.stop()
            raise EngineLostError(self._words(f"no answer within {setting}={limit_s:g}")) from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the server and all processes that it started."""
        guard = self._guard
        if guard is None:
            return
        assert guard.stdin is not None, "the guard has an input"
        guard.stdin.close()
        await guard.wait()

    async def watch(self) -> None:
        """Wait for the end of the server, then raise `EngineLostError`."""
        raise EngineLostError(self._words(await self._ended()))

    async def _ended(self) -> str:
        assert self._guard is not None, "not started"
        return f"the process ended with code {await self._guard.wait()}"

    async def _launch(self) -> None:
        self._port = _free_port(self.spec.host)
        with _open_private(self.spec.log) as log:  # SGLang writes its key into it
            self._log_start = log.tell()
            self._guard = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                GUARD_SCRIPT,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.spec.environment(),
                start_new_session=True,
            )
        order = Order(self.spec.command(self._port), {"api-key": self.api_key})
        assert self._guard.stdin is not None, "the guard has an input"
        self._guard.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        with suppress(ConnectionError):  # it has ended already; `_wait_until_up` finds it
            await self._guard.stdin.drain()

    async def _wait_until_up(self) -> None:
        ended = asyncio.create_task(self._ended())
        up = asyncio.create_task(self._answers())
        try:
            await asyncio.wait((ended, up), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise EngineLostError(self._words(ended.result()))
            up.result()
        finally:
            ended.cancel()
            up.cancel()

    async def _answers(self) -> None:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(headers=headers(self.api_key), timeout=timeout) as session:
            while True:
                if self._listens():
                    with suppress(aiohttp.ClientError, TimeoutError):
                        async with session.get(f"{self.url}/model_info") as response:
                            if response.status == 200:
                                return
                await asyncio.sleep(LOOK_S)

    def _listens(self) -> bool:
        """True if a process of this server listens on the port. The key must not go to another process."""
        with suppress(psutil.Error):  # it has ended
            for process in psutil.Process(self.pid).children(recursive=True):
                for end in process.net_connections("tcp"):
                    if end.status == psutil.CONN_LISTEN and end.laddr.port == self._port:
                        return True
        return False

    def _words(self, what: str) -> str:
        log = self.spec.log
        with log.open("rb") as file:
            file.seek(max(self._log_start, log.stat().st_size - TAIL_BYTES))
            tail = file.read().decode(errors="replace")
        return f"SGLang server on port {self._port}: {what}; it last said: {last_words(tail)} (log: {log})"


def last_words(output: str) -> str:
    """Find the line of a server's output that best explains its end: the last error, or else the last line."""
    lines = [_STAMP.sub("", line).strip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if _ERROR.match(line)]
    return ([*lines, *errors] or ["nothing"])[-1][:300]


def _lora_flags(lora: LoraConfig) -> dict[str, Flag]:
    return {
        "load-format": "auto",
        "enable-lora": True,
        "lora-strict-loading": True,
        "max-lora-rank": lora.rank,
        "lora-target-modules": [target.value for target in lora.targets],
        "max-loras-per-batch": MAX_LORAS,
    }


def _open_private(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


def _free_port(host: str = LOOPBACK) -> int:
    """Find a free port below the ephemeral range, so that no connection takes it before the server listens."""
    above = int(EPHEMERAL_PORTS.read_text().split()[0])
    ports = range(max(1024, above - NUM_PORTS), above) or range(1024, 1024 + NUM_PORTS)
    for port in secrets.SystemRandom().sample(ports, len(ports)):
        with socket.socket() as trial, suppress(OSError):
            trial.bind((host, port))
            return port
    raise EngineLostError(
        f"no port from {ports.start} to {ports.stop} is free for an SGLang server; stop a process that has one"
    )
