"""Speed of a run's engines: as the profile of an emulation says, as measured before, or measured now.

Measured speeds are kept in `.cache/engine_speed`, by all that they depend on. Called by the replica's actor.
"""

import asyncio
import logging
import os
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from laminar_py.config.loading import read_profile
from laminar_py.config.run import RunConfig
from laminar_py.repack.signals import EngineSpeed

log = logging.getLogger(__name__)

CACHE = Path(".cache/engine_speed")


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement, which is not kept if the engine had other work too."""

    speed: EngineSpeed
    alone: bool


async def engine_speed(config: RunConfig, measure: Callable[[], Awaitable[Measured]]) -> EngineSpeed:
    """Speed of one replica on this host; `repack.roofline_batch` overrides what was measured."""
    speed = _emulated(config) if config.emulation is not None else await _measured(config, measure)
    return speed.with_roofline(config.repack.roofline_batch)


def _emulated(config: RunConfig) -> EngineSpeed:
    assert config.emulation is not None, "there is a profile"
    times, fast = read_profile(config.emulation.profile).engine, config.emulation.compression
    return EngineSpeed(
        step_s=times.step_s / fast,
        step_s_per_sequence=0.0,
        step_s_per_token=times.kv_token_s / fast,
        prefill_tokens_per_s=times.prefill_tokens_per_s * fast,
        roofline_batch=config.rollout.max_batch,
    )


async def _measured(config: RunConfig, measure: Callable[[], Awaitable[Measured]]) -> EngineSpeed:
    path = CACHE / f"{await asyncio.to_thread(_key, config)}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineSpeed)
    except (OSError, msgspec.DecodeError):
        measured = await measure()
    if measured.alone:
        _keep(path, measured.speed)
    return measured.speed


def _keep(path: Path, speed: EngineSpeed) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(speed))
        partial.rename(path)
    except OSError as error:
        log.warning("%s is not kept: %s", path, error)


def _key(config: RunConfig) -> str:
    rollout = config.rollout
    sizes = f"{rollout.max_batch} {rollout.max_len} {rollout.kv_capacity}"
    model = (config.model.path / "config.json").read_text()
    drawn = f"{rollout.sampling.model_dump_json()} {rollout.record}"
    parts = (rollout.engine.model_dump_json(), sizes, drawn, model, _device(config))
    return blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def _device(config: RunConfig) -> str:
    """The name of what the engine runs on."""
    if config.rollout.engine.gpus:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return "cuda"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return f"{[line for line in lines if line.startswith('model name')][:1]} {len(lines)}"
