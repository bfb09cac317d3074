"""Flags and environment of `sglang.launch_server`: what every launched server shares. Pure."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from laminar_py.config.cluster import Device
from laminar_py.config.section import ConfigError

LOOPBACK = "127.0.0.1"
Flag = str | int | float | bool | Sequence[str | int | float]
NO_FLAGS: Mapping[str, Flag] = {}
_ALONE = "a server is one replica on one node; set rollout.replicas or rollout.engine.tensor_parallel"
RESERVED = {  # every spelling -> remedy
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
    "sleep-on-idle": True,  # else a server that has nothing to do keeps a core busy
    "attention-backend": "torch_native",
    "lora-backend": "torch_native",
    "cuda-graph-backend-decode": "disabled",
    "cuda-graph-backend-prefill": "disabled",
}


def check_flags(flags: Mapping[str, Flag], *, field: str, reserved: Mapping[str, str]) -> None:
    """Refuse flags that the run chooses, which are `reserved` with a remedy each. Raises `ConfigError`."""
    for name, value in flags.items():
        for one, remedy in reserved.items():
            if one.startswith(flag_name(name)):  # the server takes beginnings of names too
                raise ConfigError(f"{field}.{name}={value}: {remedy}")


def launch_command(python: Path, flags: Mapping[str, Flag], given: Mapping[str, Flag]) -> list[str]:
    """Command with these flags, and those `given` by a user, which win; False removes one."""
    command = [str(python), "-m", "sglang.launch_server"]
    for name, value in {**flags, **{flag_name(name): value for name, value in given.items()}}.items():
        if value is not False:
            command += [f"--{name}", *_words_of(value)]
    return command


def server_environment(device: Device) -> dict[str, str]:
    """Environment variables of this process, and those that a server needs."""
    special = _CPU_ENVIRONMENT if device is Device.CPU else {}
    return {**os.environ, **_ENVIRONMENT, **special}


def flag_name(name: str) -> str:
    """Name of a flag as the server spells it, e.g. "max-total-tokens"."""
    return name.lstrip("-").replace("_", "-")


def _words_of(value: Flag) -> list[str]:
    if value is True:
        return []
    return [str(value)] if isinstance(value, str | int | float) else [str(item) for item in value]
