"""Launches of SGLang servers: flags, command line, environment, and the checks before a launch.

`replica_server` describes the server of a replica, `pool_server` a server of `reward.servers`; `SGLangServer` runs
either.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from laminar_py.config.cluster import Device
from laminar_py.config.engine import Quantization
from laminar_py.config.learner import LoraConfig
from laminar_py.config.reward import RewardConfig, ServerPoolConfig
from laminar_py.config.section import ConfigError
from laminar_py.engines.model_sizes import served_dtype
from laminar_py.engines.sglang.settings import OFF_CUDA, Flag, Flags, algorithm_in, flag_name
from laminar_py.engines.sglang.toolkit import check_compilers, compiler_environment, own_path
from laminar_py.records.pieces import Recording

LOOPBACK = "127.0.0.1"
MIN_VERSION = (0, 5, 23)  # the oldest that the client was tested with
# SGLang reserves the last positions of its context: 6 for a prompt, 2 for a response
SPARE_TOKENS = 8
MAX_LORAS = 2  # in one batch: the adapter of new requests, and the adapter of older requests
MASK_TOKENS = 4096  # tokens of a recorded mask by default
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
HELD_S = 10**9  # beyond any learner's turn
_ALONE = "a server is one replica on one node; set rollout.replicas or rollout.engine.tensor_parallel"
_CHOSEN = "the run chooses it; leave it out"
_THRESHOLDS = ("speculative-accept-threshold-single", "speculative-accept-threshold-acc")
_EXACT = "only 1.0 draws from the model's distribution; leave it out"
_ROUNDING = ("quantization", "kv-cache-dtype")
_RESERVED = {  # every spelling of a flag -> remedy
    "speculative-algorithm": "set rollout.engine.speculation",
    **dict.fromkeys(_ROUNDING, "set rollout.engine.quantization"),
    **dict.fromkeys(("host", "port", "api-key", "admin-api-key", "config"), _CHOSEN),
    **dict.fromkeys(("model-path", "model"), "set model.path"),
    **dict.fromkeys(("tp-size", "tensor-parallel-size"), "set rollout.engine.tensor_parallel"),
    **dict.fromkeys(("dp-size", "data-parallel-size", "pp-size", "pipeline-parallel-size"), _ALONE),
    **dict.fromkeys(("nnodes", "node-rank"), _ALONE),
    **dict.fromkeys(("base-gpu-id", "gpu-id-step"), "the cluster chooses the GPUs; leave it out"),
    **dict.fromkeys(_THRESHOLDS, _EXACT),
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
_CPU_FLAGS: dict[str, Flag] = {
    "sleep-on-idle": True,  # else an idle server keeps a core busy
    "attention-backend": "torch_native",
    "lora-backend": "torch_native",
    "cuda-graph-backend-decode": "disabled",
    "cuda-graph-backend-prefill": "disabled",
}
PLUGIN = Path(__file__).with_name("plugin")  # of SGLang, for an interpreter that may lack laminar_py
_VERSION = "from importlib.metadata import version; print(version('sglang'))"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """A server to launch, e.g. `replica_server(python, folder, log, max_batch=64, max_len=8192)`."""

    python: Path  # interpreter of the environment that has SGLang
    model_dir: Path
    log: Path  # the server's output is appended
    device: Device
    flags: Flags
    start_limit: tuple[str, float]  # the setting that limits its start, and the seconds
    host: str = LOOPBACK
    shared_gpus: str = ""  # that it sees, as CUDA_VISIBLE_DEVICES names them; empty: this process's

    def command(self, port: int) -> list[str]:
        """Command line of the server on `port`, without the key. False removes a flag."""
        command = [str(self.python), "-m", "sglang.launch_server"]
        for name, value in {**self.flags, "host": self.host, "port": port}.items():
            if value is True:
                command.append(f"--{name}")
            elif value is not False:
                values = [value] if isinstance(value, str | int | float) else value
                command += [f"--{name}", *map(str, values)]
        return command

    def environment(self) -> dict[str, str]:
        """Environment variables of the server: this process's, SGLang's own, our plugin, and a GPU's compiler."""
        special = _CPU_ENVIRONMENT if self.device is Device.CPU else compiler_environment(self.python)
        modules = os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH"))))
        own = {"PATH": own_path(self.python), "PYTHONPATH": modules}
        inherited = dict(os.environ)
        if self.shared_gpus:
            own["CUDA_VISIBLE_DEVICES"] = self.shared_gpus
            for name in ALLOCATOR:  # settings for the learner's rank on this GPU; the memory saver refuses some
                inherited.pop(name, None)
        return {**inherited, **own, **_ENVIRONMENT, **special}


def replica_server(
    python: Path,
    model_dir: Path,
    log: Path,
    *,
    max_batch: int,
    max_len: int,
    kv_capacity: int | None = None,
    device: Device = Device.CUDA,
    dtype: str = "bfloat16",
    tensor_parallel: int = 1,
    stream_interval: int = 1,
    record: tuple[Recording, ...] = (),
    lora: LoraConfig | None = None,
    mask_tokens: int = 0,
    flags: Flags | None = None,
    start_timeout_s: float = 900.0,
    shared_gpus: str = "",
    speculates: bool = False,
    quantization: Quantization = Quantization.NONE,
) -> ServerSpec:
    """Describe a server of one replica, for trajectories of `max_len` tokens.

    The server reads `config.json`, and with `lora` the weights beside it. `kv_capacity=None` fills the GPU's
    memory; `mask_tokens` is the top-k of masks. The user's `flags` override ours. Raises `ConfigError`.
    """
    if device is Device.CPU and kv_capacity is None:
        raise ConfigError("rollout.kv_capacity=None: on a CPU it would take all memory; set a number of tokens")
    defaults: dict[str, Flag] = {
        "model-path": str(model_dir),
        "load-format": "dummy",
        "dtype": dtype,
        "tp-size": tensor_parallel,
        "max-running-requests": max_batch,
        "context-length": max_len + SPARE_TOKENS,
        "max-total-tokens": max(kv_capacity, max_len + SPARE_TOKENS) if kv_capacity is not None else False,
        "stream-interval": stream_interval,
        "incremental-streaming-output": True,
        "skip-tokenizer-init": True,
        **_feature_flags(record, lora, mask_tokens, speculates=speculates) | _rounding_flags(quantization),
    }
    return ServerSpec(
        python=python,
        model_dir=model_dir,
        log=log,
        device=device,
        flags=_with_users_flags(defaults, flags or {}, device, field="rollout.engine.flags", reserved=_RESERVED),
        start_limit=("rollout.engine.start_timeout_s", start_timeout_s),
        shared_gpus=shared_gpus,
    )


def sharing_flags(*, releases: bool) -> dict[str, Flag]:
    """Flags of a server that takes turns with the learner, and then `releases` the memory of its KV cache or not.

    SGLang's own watchdog ends a server whose batch stands still for 5 minutes, also while it is paused.
    """
    return {"watchdog-timeout": HELD_S, "sleep-on-idle": True, "enable-memory-saver": releases}


def check_flags(flags: Flags, device: Device) -> None:
    """Raise `ConfigError` for flags that no server of a replica can have."""
    _with_users_flags({}, flags, device, field="rollout.engine.flags", reserved=_RESERVED)


def _feature_flags(
    record: tuple[Recording, ...], lora: LoraConfig | None, mask_tokens: int, *, speculates: bool
) -> dict[str, Flag]:
    """Flags of a server that records, speculates or serves adapters."""
    flags: dict[str, Flag] = {"enable-return-routed-experts": Recording.ROUTED_EXPERTS in record}
    if speculates:
        flags["speculative-algorithm"] = "NGRAM"
    # ties with the last token of top_k make a longer mask, and the server ends a request with a longer mask
    if Recording.SAMPLING_MASK in record and 2 * mask_tokens > MASK_TOKENS:
        flags["sampling-mask-max-tokens"] = 2 * mask_tokens
    if lora is not None:
        flags |= {
            "load-format": "auto",
            "enable-lora": True,
            "lora-strict-loading": True,
            "max-lora-rank": lora.rank,
            "lora-target-modules": [target.value for target in lora.targets],
            "max-loras-per-batch": MAX_LORAS,
        }
    return flags


def _rounding_flags(quantization: Quantization) -> dict[str, Flag]:
    """Flags of a server that rounds weights at each load: SGLang does so only with its loader for RL.

    That loader begins with the weights in the model's folder, and keeps their fp8 parameters and scales for loads.
    """
    if quantization is Quantization.NONE:
        return {}
    flags: dict[str, Flag] = {"quantization": "fp8", "load-format": "flash_rl"}
    return flags if quantization is Quantization.FP8 else {**flags, "kv-cache-dtype": "fp8_e4m3"}


def pool_server(
    pool: str, settings: ServerPoolConfig, log: Path, *, host: str = LOOPBACK, first_gpu: int = 0
) -> ServerSpec:
    """Describe a server of a pool, with the weights and tokenizer in the model's folder.

    `first_gpu` is the index of the server's first GPU among the visible GPUs. Raises `ConfigError` for settings
    that can never start.
    """
    field, device = f"reward.servers.{pool}", Device.CUDA if settings.gpus else Device.CPU
    if device is Device.CPU and "max-total-tokens" not in map(flag_name, settings.flags):
        raise ConfigError(
            f"{field}.flags.max-total-tokens=None: on a CPU it would take all memory; set a number of tokens"
        )
    reserved = dict.fromkeys([*_RESERVED, "served-model-name"], _CHOSEN)
    reserved |= dict.fromkeys(("model-path", "model"), f"set {field}.model")
    reserved |= dict.fromkeys(("tp-size", "tensor-parallel-size", "device"), f"set {field}.gpus")
    # no law needs the exact distribution of a judge
    for name in ("dtype", "speculative-algorithm", *_THRESHOLDS, *_ROUNDING):
        del reserved[name]
    defaults: dict[str, Flag] = {
        "model-path": str(settings.model),
        "served-model-name": pool,
        "dtype": served_dtype(settings.model, field=f"{field}.model"),
        "tp-size": max(1, settings.gpus),
        "base-gpu-id": first_gpu or False,
    }
    return ServerSpec(
        python=settings.interpreter,
        model_dir=settings.model,
        log=log,
        device=device,
        flags=_with_users_flags(defaults, settings.flags, device, field=f"{field}.flags", reserved=reserved),
        start_limit=(f"{field}.start_timeout_s", settings.start_timeout_s),
        host=host,
    )


def _with_users_flags(
    defaults: dict[str, Flag], users_flags: Flags, device: Device, *, field: str, reserved: Mapping[str, str]
) -> Flags:
    """Add common flags, the device's and the user's. `ConfigError` for a `reserved` flag, with its remedy."""
    if (algorithm := algorithm_in(users_flags)) != "NONE" and device is Device.CPU:
        raise ConfigError(f"{field}.speculative-algorithm={algorithm}: {OFF_CUDA}")
    for name, value in users_flags.items():
        for spelling, remedy in reserved.items():
            if spelling.startswith(flag_name(name)):  # the server accepts prefixes of flag names
                raise ConfigError(f"{field}.{name}={value}: {remedy}")
    of_device = _CPU_FLAGS if device is Device.CPU else {}
    common = {"device": device.value, "skip-server-warmup": True, "log-level-http": "warning"}
    return {**defaults, **common, **of_device, **{flag_name(name): value for name, value in users_flags.items()}}


def check_pool(reward: RewardConfig, pool: str) -> None:
    """Raise `ConfigError` if this host cannot start the servers of `pool`."""
    settings, field = reward.servers[pool], f"reward.servers.{pool}"
    if not (settings.model / "config.json").is_file():
        raise ConfigError(f"{field}.model={settings.model}: no config.json in it; name a Hugging Face folder")
    pool_server(pool, settings, Path())
    check_interpreter(settings.interpreter, field=f"{field}.python", compiles=bool(settings.gpus))


def check_interpreter(python: Path, *, field: str, compiles: bool) -> None:
    """Raise `ConfigError` if the interpreter `python` of this host has no SGLang or an old version.

    A server on GPUs `compiles` kernels, and needs compilers.
    """
    remedy = "name the interpreter of an environment with SGLang (for a CPU `make test-sglang` makes .venv-sglang)"
    try:
        asked = subprocess.run(
            [str(python), "-c", _VERSION], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{field}={python}: does not run ({error}); {remedy}") from None
    if asked.returncode:
        raise ConfigError(f"{field}={python}: has no SGLang; {remedy}")
    version = asked.stdout.strip()
    if version_numbers(version) < MIN_VERSION:
        oldest = ".".join(map(str, MIN_VERSION))
        raise ConfigError(f"{field}={python}: has SGLang {version}; install {oldest} or newer")
    if compiles:
        check_compilers(python, field=field)


def version_numbers(version: str) -> tuple[int, ...]:
    """Parse a release number, e.g. (0, 5, 23); zeros if `version` has another form."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else (0, 0, 0)
