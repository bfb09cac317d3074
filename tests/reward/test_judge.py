"""The judge, before a real HTTP server that answers as OpenAI's do."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from laminar_contrib.reward_models import judge as judge_module
from laminar_py.config.reward import RewardConfig
from laminar_py.config.section import ConfigError
from laminar_py.records.trajectory import DropReason
from laminar_py.reward import scorer as scorer_module
from tests.reward.requests import make_request, serving
from tests.reward.test_scorer import score, scorer_of


class Server:
    """Gives each question to `answer`, which returns a reply or a status; keeps questions and keys."""

    def __init__(self, answer: Callable[[str], str | int]) -> None:
        self._answer = answer
        self.questions: list[str] = []
        self.keys: set[str | None] = set()
        self.ends = "stop"

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.questions.append(body["messages"][0]["content"])
        self.keys.add(request.headers.get("Authorization"))
        answer = self._answer(self.questions[-1])
        if isinstance(answer, int):
            return web.Response(status=answer)
        message = {"role": "assistant", "content": answer}
        return web.json_response({"choices": [{"message": message, "finish_reason": self.ends}]})


@asynccontextmanager
async def judged_by(server: Server, folder: Path, *, before: tuple = (), **settings: object) -> AsyncIterator:
    async with serving("/v1/chat/completions", server.complete) as url:
        judge = {"kind": "judge", "urls": [f"{url}/v1"], "model": "m"} | settings
        reward = {"use": [*before, judge]} | ({"env": ["JUDGE_KEY"]} if "key" in settings else {})
        async with scorer_of(folder, reward) as scorer:
            yield scorer


async def test_only_a_yes_in_both_orders_counts(tmp_path):
    def first_only(question: str) -> str:
        if "agreed" in question:
            return "yes"
        return "Yes." if question.index("unsure") > question.index("Answer B") else "It is: **No**"

    server = Server(first_only)
    async with judged_by(server, tmp_path) as scorer:
        same, unsure = await score(scorer, make_request("agreed"), make_request("unsure", index=1))
    assert (same.value, unsure.value) == (1.0, 0.0)
    assert len(server.questions) == 4
    assert same.terms[0].text == "the judge: yes"


async def test_the_judge_sees_what_comes_after_the_thinking_alone(tmp_path):
    server = Server(lambda question: "no")
    async with judged_by(server, tmp_path) as scorer:
        await score(scorer, make_request("<think>secret</think> 7"))
    assert "secret" not in server.questions[0]


async def test_it_is_asked_only_where_the_rules_reject(tmp_path):
    server = Server(lambda question: "yes")
    exact = {"kind": "exact", "pattern": "#(.)$"}
    async with judged_by(server, tmp_path, before=(exact,), unless="exact") as scorer:
        right, other = await score(scorer, make_request("#7"), make_request("seven", index=1))
    assert (right.value, other.value) == (1.0, 1.0)
    assert [term.name for term in right.terms] == ["exact"]
    assert not any("#7" in question for question in server.questions)


async def test_a_busy_server_is_asked_again_and_one_that_refuses_is_a_labelled_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(scorer_module, "PAUSE_S", 0.0)
    replies = iter([503, 429, "yes", "yes", 400])
    async with judged_by(Server(lambda question: next(replies)), tmp_path) as scorer:
        (later,) = await score(scorer, make_request("a"))
        (refused,) = await score(scorer, make_request("b", index=1))
    assert (later.value, refused.value, refused.failure) == (1.0, None, DropReason.REWARD_FAILED)
    assert "status 400" in refused.detail


async def test_a_judge_that_does_not_commit_itself_gives_no_value(tmp_path):
    async with judged_by(Server(lambda question: "yes and no and perhaps"), tmp_path) as scorer:
        (found,) = await score(scorer, make_request("a"))
    assert found.failure is DropReason.REWARD_FAILED
    assert "neither yes nor no" in found.detail


@pytest.mark.parametrize(("ends", "cause"), [("length", "max_tokens=1024"), (None, "its server")])
async def test_a_verdict_that_a_limit_cut_gives_no_value(tmp_path, ends, cause):
    server = Server(lambda question: "The student may say yes")
    server.ends = ends
    async with judged_by(server, tmp_path) as scorer:
        (found,) = await score(scorer, make_request("a"))
    assert (found.value, found.failure) == (None, DropReason.REWARD_FAILED)
    assert f"{cause} cut the judge's reply: 'The student may say yes'" in found.detail


async def test_a_reply_without_an_end_gives_no_value(tmp_path, monkeypatch):
    monkeypatch.setattr(judge_module, "MOST_BYTES", 1 << 20)
    async with judged_by(Server(lambda question: "yes " * (1 << 19)), tmp_path) as scorer:
        (found,) = await score(scorer, make_request("a"))
    assert (found.value, found.failure) == (None, DropReason.REWARD_FAILED)
    assert "a reply of more than 1 MiB" in found.detail


async def test_its_key_is_a_variable_that_the_config_names(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    server = Server(lambda question: "no")
    async with judged_by(server, tmp_path, key="JUDGE_KEY") as scorer:
        await score(scorer, make_request("a"))
    assert server.keys == {"Bearer s3cret"}
    with pytest.raises(ConfigError, match=r"key=OTHER: no such variable among reward.env"):
        async with judged_by(server, tmp_path, key="OTHER"):
            raise AssertionError("it started")


def test_a_judge_that_waits_for_a_term_that_is_not_there_is_refused():
    judge = {"kind": "judge", "urls": ["http://a/v1"], "model": "m", "unless": "exact"}
    with pytest.raises(ValueError, match=r"reward.use: judge has unless=exact, which is no earlier term"):
        RewardConfig.model_validate_json(msgspec.json.encode({"use": [judge]}))
