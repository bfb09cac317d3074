"""Servers that a term asks: of others, or of the run, which come and go."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiohttp import web

from laminar_contrib.reward_models.judge import Servers
from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.reward import RewardConfig
from laminar_py.records.patience import Patience
from laminar_py.records.scoring import PoolAddresses, ServerAddress, TryAgainError
from laminar_py.records.trajectory import DropReason
from laminar_py.reward import scorer as scorer_module
from laminar_py.reward.scorer import LaunchedServers, Scorer
from tests.reward.requests import make_request, serving
from tests.reward.test_scorer import score

PATIENCE_S = 60.0
GONE = ServerAddress("http://127.0.0.1:9", "k")
STEPS = {"kind": "steps", "servers": "prm", "separator_id": 7, "labels": [5, 6]}
JUDGE = {"kind": "judge", "servers": "prm"}
POOL = {"prm": {"model": "/models/prm"}}


def reward_of(term: dict, servers: dict) -> RewardConfig:
    return RewardConfig.model_validate_json(msgspec.json.encode({"use": [term], "servers": servers}))


@pytest.mark.parametrize(
    ("term", "servers", "complaint"),
    [
        (STEPS, {}, r"servers=prm of steps: reward\.servers has no pool; add it there"),
        (STEPS, {"other": POOL["prm"]}, r"servers=prm of steps: reward\.servers has other; add it there"),
        (STEPS | {"servers": None}, {}, r"urls of steps: neither of urls and servers set; give .* or `servers`"),
        (
            STEPS | {"urls": ["http://a"]},
            POOL,
            r"urls of steps: both of urls and servers set; give ",
        ),
        (STEPS | {"key": "K"}, POOL, r"key=K: launched servers have keys of their own; leave it out"),
        (JUDGE | {"model": "m"}, POOL, r"model=m: name a model for a judge at `urls`"),
        (JUDGE | {"urls": ["http://a"], "servers": None}, {}, r"model=None: name a model for a judge at `urls`"),
        (STEPS | {"urls": ["a:1"], "servers": None}, {}, r"urls=a:1: no URL; write for example"),
        ({"kind": "exact", "pattern": "(.)"}, POOL, r"reward\.servers\.prm: no term asks it; name it in one"),
    ],
)
def test_a_term_has_servers_of_others_or_a_pool_that_there_is(term, servers, complaint):
    with pytest.raises(ValueError, match=complaint):
        reward_of(term, servers)


def test_the_servers_of_a_run_are_those_of_all_pools():
    other = {"judge": {"model": "/models/judge", "count": 2}}
    by_task = {"proof": [JUDGE | {"servers": "judge"}]}
    whole = {"use": [STEPS], "by_task": by_task, "servers": POOL | other}
    reward = RewardConfig.model_validate_json(msgspec.json.encode(whole))
    assert reward.launched == (("prm", 0), ("judge", 0), ("judge", 1))


@asynccontextmanager
async def answering(key: str):
    """Address of a server with this key that counts its answers."""
    answers = []

    async def reply(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {key}":
            return web.Response(status=401)
        answers.append(1)
        return web.json_response(len(answers))

    async with serving("/score", reply) as url:
        yield ServerAddress(url, key)


@asynccontextmanager
async def asking(launched: LaunchedServers):
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
        yield Servers(lambda: launched.wait_for_servers("prm"), session, lambda: Patience(PATIENCE_S))


async def test_a_call_waits_until_a_server_of_its_pool_is_up_and_brings_the_key_of_that():
    launched = LaunchedServers()
    async with answering("k1") as first, asking(launched) as servers:
        call = asyncio.create_task(servers.post_json("score", {}, int))
        launched.update(PoolAddresses(1, {"other": [GONE]}))
        await asyncio.sleep(0)
        assert not call.done()
        launched.update(PoolAddresses(2, {"prm": [first]}))
        assert await call == 1
        async with answering("k2") as second:
            launched.update(PoolAddresses(4, {"prm": [second]}))
            launched.update(PoolAddresses(3, {"prm": [GONE]}))  # late
            assert await servers.post_json("score", {}, int) == 1


async def test_calls_that_time_out_together_before_the_first_answer_are_all_late():
    patience = Patience(0.01, first_s=0.02)

    async def call():
        try:
            async with patience.timer():
                await asyncio.sleep(PATIENCE_S)
        except TimeoutError:
            patience.note_answer()  # a server that is overloaded, not down
            return "late"

    assert await asyncio.gather(*(call() for _ in range(4))) == ["late"] * 4


async def test_a_server_that_failed_does_not_draw_all_calls():
    launched = LaunchedServers()
    async with answering("k") as server, asking(launched) as servers:
        launched.update(PoolAddresses(1, {"prm": [GONE, server]}))
        with pytest.raises(TryAgainError, match=r"127\.0\.0\.1:9/score"):
            await servers.post_json("score", {}, int)
        assert [await servers.post_json("score", {}, int) for _ in range(5)] == [1, 2, 3, 4, 5]


async def test_a_server_that_is_busy_does_not_draw_all_calls():
    async def busy(request: web.Request) -> web.Response:
        return web.Response(status=503)

    launched = LaunchedServers()
    async with serving("/score", busy) as url, answering("k") as server, asking(launched) as servers:
        launched.update(PoolAddresses(1, {"prm": [ServerAddress(url, "k"), server]}))
        with pytest.raises(TryAgainError, match="status 503"):
            await servers.post_json("score", {}, int)
        assert [await servers.post_json("score", {}, int) for _ in range(3)] == [1, 2, 3]


@asynccontextmanager
async def judged_by(complete, folder, term, pool):
    """A scorer whose judge is a server of a pool."""
    launched = LaunchedServers()
    async with serving("/v1/chat/completions", complete) as url:
        launched.update(PoolAddresses(1, {"prm": [ServerAddress(url, "k")]}))
        async with Scorer(
            reward_of(term, {"prm": POOL["prm"] | pool}),
            sandbox=SandboxConfig(),
            columns=(),
            decode=lambda ids: "seven",
            folder=folder,
            name="s",
            launched=launched,
        ) as scorer:
            yield scorer


YES = {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}


async def test_a_server_of_a_pool_has_the_time_of_its_start_until_its_first_answer_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(scorer_module, "RETRY_FOR_S", 0.0)
    silent_s = iter([2.0, 0.0, *[60.0] * 9])

    async def complete(request: web.Request) -> web.Response:
        await asyncio.sleep(next(silent_s))
        return web.json_response(YES)

    term, pool = JUDGE | {"timeout_s": 0.5}, {"start_timeout_s": 30.0}
    async with judged_by(complete, tmp_path, term, pool) as scorer, asyncio.timeout(PATIENCE_S):
        (first,) = await score(scorer, make_request("seven"))
        (later,) = await score(scorer, make_request("seven", index=1, answer="8"))
    assert first.value == 1.0
    assert (later.value, later.failure) == (None, DropReason.REWARD_FAILED)
    assert "no answer in its timeout_s" in later.detail


async def test_a_judge_of_a_pool_is_asked_as_openais_are_by_the_name_of_the_pool(tmp_path):
    asked = []

    async def complete(request: web.Request) -> web.Response:
        asked.append((request.headers["Authorization"], (await request.json())["model"]))
        return web.json_response(YES)

    async with judged_by(complete, tmp_path, JUDGE, {}) as scorer:
        (found,) = await score(scorer, make_request("seven"))
    assert found.value == 1.0
    assert asked == [("Bearer k", "prm")] * 2


def test_a_key_is_in_no_log():
    assert "secret" not in repr(PoolAddresses(1, {"prm": [ServerAddress("http://a", "secret")]}))
