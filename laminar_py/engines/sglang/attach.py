"""Checks that a running SGLang server can serve a run. Called before any prompt is sent.

An accepted server answers with the run's key, has the run's model and room for its longest trajectory, and records
the fields of `rollout.record` (`tests/engines/sglang/test_attach.py`). Its weights do not matter, since a replica
loads a version before the first prompt.
"""

import ipaddress
import logging
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from laminar_py.config.rollout import OnNewWeights, RolloutConfig
from laminar_py.config.section import ConfigError
from laminar_py.engines.model_sizes import ModelSizes, read_sizes
from laminar_py.engines.sglang.http import ServerConnection
from laminar_py.engines.sglang.launch import MIN_VERSION, SPARE_TOKENS, version_numbers
from laminar_py.engines.sglang.settings import KEY_ENV, speculation_fault
from laminar_py.records.engine import EngineLostError, RefusedError
from laminar_py.records.pieces import Recording

log = logging.getLogger(__name__)

ANSWER_S = 15.0
# two models are the same if these fields agree; a server may serve fewer positions
SHAPE = tuple(name for name in ModelSizes.__struct_fields__ if name != "max_position_embeddings")


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `/server_info` that the check needs; older servers lack some of them."""

    version: str
    max_req_input_len: int = 0  # a prompt must be shorter
    incremental_streaming_output: bool = False
    disable_overlap_schedule: bool = False
    enable_return_routed_experts: bool = False
    sampling_mask_max_tokens: int = 0
    admin_api_key: str | None = None
    device: str | None = "cuda"
    speculative_algorithm: str | None = "NONE"
    speculative_accept_threshold_single: float = 1.0
    speculative_accept_threshold_acc: float = 1.0


class ModelInfo(msgspec.Struct, frozen=True):
    """The fields of `/model_info` that the check needs."""

    model_path: str
    is_generation: bool
    model_type: str | None = None
    architectures: list[str] | None = None


class Answers(NamedTuple):
    """All answers of one server to the check."""

    server: ServerInfo
    model: ModelInfo
    sizes: ModelSizes | None  # of its model folder, if this host sees the folder


async def check_server(url: str, api_key: str | None, *, model_dir: Path, rollout: RolloutConfig) -> None:
    """Check the server at `url`, and resume it if it is paused. Raises `ConfigError` if it cannot serve the run.

    Logs a warning if the server is slower than it could be.
    """
    if not is_loopback(url) and not api_key:
        raise _unusable(url, f"is beyond loopback and {KEY_ENV} has no key; set it to the server's --api-key")
    sizes = read_sizes(model_dir)
    answers = await _request_answers(url, api_key)
    fault = find_fault(answers, sizes=sizes, rollout=rollout, api_key=api_key)
    if fault is not None:
        raise _unusable(url, fault)
    if not answers.server.incremental_streaming_output:
        log.warning(
            "rollout.engine.urls=%s: repeats a whole response with every message, which costs the square of its"
            " length; start it with --incremental-streaming-output",
            url,
        )


def is_loopback(url: str) -> bool:
    """True if only this machine can reach `url`."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def find_fault(answers: Answers, *, sizes: ModelSizes, rollout: RolloutConfig, api_key: str | None) -> str | None:
    """Find the first reason why a server cannot serve the run, with a remedy; None if it can."""
    server, algorithm = answers.server, (answers.server.speculative_algorithm or "NONE").upper()
    on_cuda = (server.device or "cuda").startswith("cuda")
    if (fault := speculation_fault(algorithm, on_cuda=on_cuda, record=rollout.record)) is not None:
        return f"runs --speculative-algorithm {algorithm}: {fault}"
    if (server.speculative_accept_threshold_single, server.speculative_accept_threshold_acc) != (1.0, 1.0):
        return "accepts drafts by a threshold; start it without --speculative-accept-threshold-single and -acc"
    if version_numbers(server.version) < MIN_VERSION:
        oldest = ".".join(map(str, MIN_VERSION))
        return f"runs SGLang {server.version}; install {oldest} or newer"
    if server.admin_api_key not in (None, api_key):
        return "has an --admin-api-key that differs from the key we have, and weights need it; start it without"
    if (fault := _model_fault(answers, sizes)) is not None:
        return fault
    if (held := server.max_req_input_len) < (max_len := rollout.max_len):
        return (
            f"holds trajectories of {held} tokens, below rollout.max_len={max_len}; start it with --context-length"
            f" and --max-total-tokens of at least {max_len + SPARE_TOKENS}, or lower rollout.max_len"
        )
    if rollout.on_new_weights is OnNewWeights.IN_PLACE and not server.disable_overlap_schedule:
        return (
            "stamps a token of the old weights with the new version under rollout.on_new_weights=in_place; start"
            " it with --disable-overlap-schedule"
        )
    return _record_fault(server, rollout)


def _model_fault(answers: Answers, sizes: ModelSizes) -> str | None:
    """Say how the server's model differs from `model.path`, for the end of a sentence; None if it does not."""
    theirs, ours = (answers.model.architectures or [])[:1], (sizes.architectures or [])[:1]
    if not theirs or not ours:
        theirs, ours = [answers.model.model_type or "nothing"], [sizes.model_type or "nothing"]
    differing = [(theirs[0], ours[0])] if not answers.model.is_generation or theirs != ours else []
    for name in SHAPE if answers.sizes else ():
        served, wanted = getattr(answers.sizes, name), getattr(sizes, name)
        if served != wanted:
            differing.append((f"{name}={served}", wanted))
    if not differing:
        return None
    served, wanted = differing[0]
    return f"serves another model ({served}, but model.path has {wanted}); start it with the model of model.path"


def _record_fault(server: ServerInfo, rollout: RolloutConfig) -> str | None:
    """Say which recording of `rollout.record` the server lacks, for the end of a sentence; None if none."""
    if Recording.ROUTED_EXPERTS in rollout.record and not server.enable_return_routed_experts:
        return "does not record routed_experts of rollout.record; start it with --enable-return-routed-experts"
    # The server ends a request with a longer mask. Ties with the last kept token make a mask longer than top_k.
    if Recording.SAMPLING_MASK in rollout.record and server.sampling_mask_max_tokens <= rollout.sampling.top_k:
        return (
            f"records sampling masks of {server.sampling_mask_max_tokens} tokens at most; start it with"
            f" --sampling-mask-max-tokens above rollout.sampling.top_k={rollout.sampling.top_k}"
        )
    return None


async def _request_answers(url: str, api_key: str | None) -> Answers:
    """Ask a running server for its settings and its model. Raises `ConfigError` if it does not answer.

    Resumes the server, too.
    """
    connection = ServerConnection(url, api_key=api_key, timeout_s=ANSWER_S)
    try:
        server = await connection.get("server_info", ServerInfo)
        model = await connection.get("model_info", ModelInfo)
        await connection.post("continue_generation")  # an earlier client may have left the server paused
    except (RefusedError, EngineLostError) as error:
        words = " ".join(str(error).split())
        remedy = f"start an SGLang server there, correct the address, or set {KEY_ENV} to the server's --api-key"
        raise _unusable(url, f"does not answer as it should ({words}); {remedy}") from None
    finally:
        await connection.close()
    sizes = None
    with suppress(ConfigError):  # this host does not see the folder, or it holds another kind of model
        sizes = read_sizes(Path(model.model_path))
    return Answers(server, model, sizes)


def _unusable(url: str, words: str) -> ConfigError:
    return ConfigError(f"rollout.engine.urls={url}: {words}")
