"""The term `judge`: a language model behind an OpenAI-compatible server says whether two answers are the same.

Rules are more precise than judges, which a policy learns to please: ask one only where the rules reject, with
`unless`. It is asked twice, the two answers in either order, and only two yeses count.
"""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Self

import aiohttp
import msgspec
from pydantic import Field, model_validator

from laminar_py.config.reward import RewardKind, ServeContext, ServedReward, TermConfig
from laminar_py.config.section import ConfigError, Count
from laminar_py.records.scoring import NoValueError, Reward, ScoringRequest, TryAgainError
from laminar_py.records.trajectory import DropReason
from laminar_py.reward.text import missing_answer

QUESTION = """Problem:
{problem}

Answer A:
{first}

Answer B:
{second}

Do both answers give the same final result to the problem? End your reply with the single word yes or no."""
WORD = re.compile(r"\b(yes|no)\b[^a-z]*$", re.IGNORECASE)
BUSY = {408, 425, 429, 500, 502, 503, 504}


class JudgeTerm(TermConfig):
    """1 where a judge, asked in both orders, finds the response's answer the same as the problem's, else 0."""

    kind: str = "judge"
    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    """Servers with OpenAI's chat completions, e.g. `[http://10.0.0.4:30000/v1]`; calls go to the least busy."""
    model: str
    """Name of the model there."""
    unless: str | None = None
    """Term before this one: the judge is asked only where that gave 0 or less."""
    key: str | None = None
    """Environment variable with the servers' key, one of those in `reward.env`."""
    chars: Count = 4000
    """Characters of the response's end that the judge sees."""
    max_tokens: Count = 1024
    """Tokens that it may say."""
    at_once: Count = 64
    """Responses that each scorer asks about at a time."""

    @property
    def asked_unless(self) -> str | None:
        """The term whose rejections it looks at."""
        return self.unless

    @model_validator(mode="after")
    def _check(self) -> Self:
        wrong = next((url for url in self.urls if not url.startswith(("http://", "https://"))), None)
        if wrong is not None:
            raise ConfigError(f"urls={wrong}: no URL; write for example http://10.0.0.4:30000/v1")
        return self


class _Message(msgspec.Struct):
    content: str | None


class _Choice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class Judge:
    """Asks the servers of a term."""

    def __init__(self, term: JudgeTerm, session: aiohttp.ClientSession) -> None:
        self._term = term
        self._session = session
        self._busy = dict.fromkeys(term.urls, 0)
        self.at_once = term.at_once

    async def __call__(self, request: ScoringRequest) -> Reward:
        """1.0 or 0.0, with what the judge said last."""
        seen = request.response.rpartition("</think>")[2].strip()[-self._term.chars :]
        said = ""
        for first, second in ((request.answer, seen), (seen, request.answer)):
            said = await self._ask(QUESTION.format(problem=request.prompt, first=first, second=second))
            word = WORD.search(said)
            if word is None:
                raise NoValueError(f"the judge ended with neither yes nor no: {said[-80:]!r}")
            if word[1].lower() == "no":
                return Reward(0.0, text=f"the judge: {said[-80:]}")
        return Reward(1.0, text=f"the judge: {said[-80:]}")

    async def _ask(self, question: str) -> str:
        term = self._term
        body = {
            "model": term.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": term.max_tokens,
            "temperature": 0.0,
        }
        url = min(self._busy, key=lambda url: self._busy[url])
        self._busy[url] += 1
        try:
            return _content(await self._post(f"{url.rstrip('/')}/chat/completions", body))
        finally:
            self._busy[url] -= 1

    async def _post(self, url: str, body: dict[str, object]) -> bytes:
        try:
            async with self._session.post(url, json=body) as reply:
                content = await reply.read()
        except TimeoutError:
            raise TryAgainError(f"{url}: no answer in reward.timeout_s") from None
        except aiohttp.ClientError as error:
            raise TryAgainError(f"{url}: {error!r}") from error
        if reply.status in BUSY:
            raise TryAgainError(f"{url}: status {reply.status}")
        if reply.status != 200:
            raise NoValueError(f"{url}: status {reply.status}: {content[:200].decode(errors='replace')}")
        return content


def _content(reply: bytes) -> str:
    try:
        choices = msgspec.json.decode(reply, type=_Completion).choices
    except msgspec.DecodeError as error:
        raise NoValueError(f"the judge's server answers otherwise than OpenAI's: {error}") from error
    if not choices or not choices[0].message.content:
        raise NoValueError("the judge said nothing", DropReason.REWARD_FAILED)
    return choices[0].message.content


@asynccontextmanager
async def open_judge(term: JudgeTerm, context: ServeContext) -> AsyncIterator[ServedReward]:
    """A judge while its connections are open."""
    if term.key is not None and term.key not in context.env:
        raise ConfigError(f"judge key={term.key}: no such variable among reward.env; set it and name it there")
    headers = {} if term.key is None else {"Authorization": f"Bearer {context.env[term.key]}"}
    limit = aiohttp.ClientTimeout(total=context.timeout_s)
    async with aiohttp.ClientSession(headers=headers, timeout=limit) as session:
        yield Judge(term, session)


JUDGE = RewardKind(settings=JudgeTerm, serve=open_judge, caches=True, fault=missing_answer)
