"""Checks that a running SGLang server can serve a run. Called before any prompt is sent.

An accepted server answers with the run's key, has the run's model and room for its longest trajectory, and records
the fields of `rollout.record` (`tests/engines/sglang/test_attach.py`). Its weights do not matter, since a replica
loads a version before the first prompt.
"""

import ipaddress
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec

from laminar_py.config.rollout import OnNewWeights, RolloutConfig
from laminar_py.config.section import ConfigError
from laminar_py.engines.model_sizes import ModelSizes, read_sizes
from laminar_py.engines.sglang.http import headers
from laminar_py.engines.sglang.server import SPARE_TOKENS
from laminar_py.engines.sglang.settings import KEY_ENV
from laminar_py.records.pieces import Recording

log = logging.getLogger(__name__)

MIN_VERSION = (0, 5, 23)  # the oldest that the client was tested with
ANSWER_S = 15.0
OUT_OF_VOCABULARY = {
    "input_ids": [0],
    "sampling_params": {"max_new_tokens": 1},
    "return_logprob": True,
    "token_ids_logprob": [-1],
}
# two models are the same if these fields agree; a server may serve fewer positions
SHAPE = tuple(name for name in ModelSizes.__struct_fields__ if name != "max_position_embeddings")
_VOCABULARY = re.compile(r"valid range is \[0, (\d+)\)")


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `/server_info` that the check needs; older servers lack some of them."""

    version: str
    max_req_input_len: int = 0  # a prompt must be shorter
    incremental_streaming_output: bool = False
    disable_overlap_schedule: bool = False
    enable_return_routed_experts: bool = False
    sampling_mask_max_tokens: int = 0
    admin_api_key: str | None = None


class ModelInfo(msgspec.Struct, frozen=True):
    """The fields of `/model_info` that the check needs."""

    model_path: str
    is_generation: bool
    model_type: str | None = None
    architectures: list[str] | None = None


@dataclass(frozen=True, slots=True)
class Answers:
    """All answers of one server to the check."""

    server: ServerInfo
    model: ModelInfo
    vocab: int | None  # None if unknown
    sizes: ModelSizes | None  # of its model folder, if this host sees the folder


async def check_server(url: str, api_key: str | None, *, model_dir: Path, rollout: RolloutConfig) -> None:
    """Check the server at `url`, and continue it if it is paused. Raises `ConfigError` if it cannot serve the run.

    Logs a warning for each setting that makes the server slower or less checked than it could be.
    """
    if not is_loopback(url) and not api_key:
        raise _unusable(url, f"is beyond loopback and {KEY_ENV} has no key; set it to the server's --api-key")
    sizes = read_sizes(model_dir)
    answers = await _ask(url, api_key)
    fault = find_fault(answers, sizes=sizes, rollout=rollout, api_key=api_key)
    if fault is not None:
        raise _unusable(url, fault)
    for warning in find_warnings(answers):
        log.warning("rollout.engine.urls=%s: %s", url, warning)


def is_loopback(url: str) -> bool:
    """True if only this machine can reach `url`. Raises `ConfigError` if `url` is no address of a server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _unusable(url, "is no address of a server; write for example http://10.0.0.5:30000")
    try:
        return ipaddress.ip_address(parts.hostname).is_loopback
    except ValueError:
        return parts.hostname == "localhost"


def find_fault(answers: Answers, *, sizes: ModelSizes, rollout: RolloutConfig, api_key: str | None) -> str | None:
    """Find the first reason why a server cannot serve the run, with a remedy; None if it can."""
    server = answers.server
    if version_numbers(server.version) < MIN_VERSION:
        oldest = ".".join(map(str, MIN_VERSION))
        return f"runs SGLang {server.version}; install {oldest} or newer"
    if server.admin_api_key not in (None, api_key):
        return "has an --admin-api-key that differs from the key we have, and weights need it; start it without"
    return (
        _model_fault(answers, sizes)
        or _room_fault(server, rollout.max_len)
        or _swap_fault(server, rollout.on_new_weights)
        or _record_fault(server, rollout)
    )


def _model_fault(answers: Answers, sizes: ModelSizes) -> str | None:
    remedy = "start it with the model of model.path"
    theirs, ours = (answers.model.architectures or [])[:1], (sizes.architectures or [])[:1]
    if not theirs or not ours:
        theirs, ours = [answers.model.model_type or "nothing"], [sizes.model_type or "nothing"]
    if not answers.model.is_generation or theirs != ours:
        return f"serves another model ({theirs[0]}, but model.path has {ours[0]}); {remedy}"
    if answers.vocab not in (None, sizes.vocab_size):
        return (
            f"serves another model (vocabulary of {answers.vocab}, but model.path has {sizes.vocab_size});"
            f" {remedy}"
        )
    for name in SHAPE if answers.sizes else ():
        served, wanted = getattr(answers.sizes, name), getattr(sizes, name)
        if served != wanted:
            return f"serves another model ({name}={served}, but model.path has {wanted}); {remedy}"
    return None


def _room_fault(server: ServerInfo, max_len: int) -> str | None:
    if server.max_req_input_len >= max_len:
        return None
    return (
        f"holds trajectories of {server.max_req_input_len} tokens, below rollout.max_len={max_len}; start it with"
        f" --context-length and --max-total-tokens of at least {max_len + SPARE_TOKENS}, or lower rollout.max_len"
    )


def _swap_fault(server: ServerInfo, on_new_weights: OnNewWeights) -> str | None:
    if on_new_weights is not OnNewWeights.IN_PLACE or server.disable_overlap_schedule:
        return None
    return (
        "counts a token of the old weights to the new ones under rollout.on_new_weights=in_place; start it with"
        " --disable-overlap-schedule"
    )


def _record_fault(server: ServerInfo, rollout: RolloutConfig) -> str | None:
    if Recording.ROUTED_EXPERTS in rollout.record and not server.enable_return_routed_experts:
        return "does not record routed_experts of rollout.record; start it with --enable-return-routed-experts"
    # The server ends a request with a longer mask. Ties with the last kept token make a mask longer than top_k.
    if Recording.SAMPLING_MASK in rollout.record and server.sampling_mask_max_tokens <= rollout.sampling.top_k:
        return (
            f"records sampling masks of {server.sampling_mask_max_tokens} tokens at most; start it with"
            f" --sampling-mask-max-tokens above rollout.sampling.top_k={rollout.sampling.top_k}"
        )
    return None


def find_warnings(answers: Answers) -> list[str]:
    """Find settings that make a usable server slower or less checked than it could be, with remedies."""
    warnings = []
    if not answers.server.incremental_streaming_output:
        warnings.append(
            "repeats a whole response with every message, which costs the square of its length; start it with"
            " --incremental-streaming-output"
        )
    if answers.vocab is None:
        warnings.append("does not say its vocabulary, which stays unchecked until weights are loaded")
    return warnings


async def _ask(url: str, api_key: str | None) -> Answers:
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    base = url.rstrip("/")
    try:
        async with aiohttp.ClientSession(headers=headers(api_key), timeout=timeout) as session:
            status, data = await _call(session, "GET", f"{base}/server_info")
            if status == 401:
                what = "does not take the key" if api_key else "wants a key, and there is none"
                raise _unusable(url, f"{what} in {KEY_ENV}; set it to the server's --api-key")
            if status != 200:
                raise _unusable(url, f"answers {status} to /server_info; start an SGLang server there")
            server = msgspec.json.decode(data, type=ServerInfo)
            _, data = await _call(session, "GET", f"{base}/model_info")
            model = msgspec.json.decode(data, type=ModelInfo)
            # an earlier client may have left the server paused, and it would then not answer `/generate`
            await _call(session, "POST", f"{base}/continue_generation", {})
            # the server refuses this request before it generates, and the refusal names its vocabulary
            _, data = await _call(session, "POST", f"{base}/generate", OUT_OF_VOCABULARY)
    except TimeoutError:
        raise _unusable(url, f"does not answer within {ANSWER_S:g} s; restart it or correct the address") from None
    except (aiohttp.ClientError, OSError) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise _unusable(url, f"does not answer ({words}); start it or correct the address") from None
    except msgspec.DecodeError as error:
        raise _unusable(url, f"answers as no SGLang server does ({error}); correct the address") from None
    said = _VOCABULARY.search(data.decode(errors="replace"))
    return Answers(server, model, int(said[1]) if said else None, _visible_sizes(model.model_path))


async def _call(session: aiohttp.ClientSession, method: str, url: str, body: object = None) -> tuple[int, bytes]:
    content = None if body is None else msgspec.json.encode(body)
    # no redirects, so that the key goes to no other server
    async with session.request(method, url, data=content, allow_redirects=False) as response:
        return response.status, await response.read()


def _visible_sizes(model_path: str) -> ModelSizes | None:
    config = Path(model_path) / "config.json"
    if not config.is_file():
        return None
    try:
        return msgspec.json.decode(config.read_bytes(), type=ModelSizes)
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
    ):  # another kind of model, which the check of architectures refuses
        return None


def version_numbers(version: str) -> tuple[int, ...]:
    """Parse a release number, e.g. (0, 5, 23); zeros if `version` has another form."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else (0, 0, 0)


def _unusable(url: str, words: str) -> ConfigError:
    return ConfigError(f"rollout.engine.urls={url}: {words}")
