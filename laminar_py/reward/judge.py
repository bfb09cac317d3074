"""The term `judge`: a language model behind an OpenAI-compatible server says whether two answers are the same.

Rules are more precise than judges, which a policy learns to please: ask one only where the rules reject, with
`unless`. It is asked twice, the two answers in either order, and only two yeses count.
"""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import msgspec
from pydantic import model_validator

from laminar_py.config.reward import RewardKind, ServeContext, ServedReward
from laminar_py.config.section import ConfigError, Count, Seconds
from laminar_py.records.scoring import NoValueError, Reward, ScoringRequest
from laminar_py.reward.servers import AskingTerm, Servers, open_servers
from laminar_py.reward.text import missing_answer

QUESTION = """Problem:
{problem}

Answer A:
{first}

Answer B:
{second}

Do both answers give the same final result to the problem? End your reply with the single word yes or no."""
WORD = re.compile(r"\b(yes|no)\b[^a-z]*$", re.IGNORECASE)
SHOWN = 80  # characters of a reply's end


class JudgeTerm(AskingTerm):
    """1 where a judge, asked in both orders, finds the response's answer the same as the problem's, else 0."""

    kind: str = "judge"
    timeout_s: Seconds | None = 120.0
    """Longest time of both questions about a response; null: `reward.timeout_s`."""
    urls: tuple[str, ...] = ()
    """Servers with OpenAI's chat completions, e.g. `[http://10.0.0.4:30000/v1]`; calls go to the least busy."""
    model: str | None = None
    """Name of the model at `urls`."""
    unless: str | None = None
    """Term before this one: the judge is asked only where that gave 0 or less."""
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
    def _check_model(self) -> Self:
        if (self.model is None) == bool(self.urls):
            raise ConfigError(
                f"model={self.model}: a judge at `urls` has a model to name; one in reward.servers has its own"
            )
        return self


class Said(msgspec.Struct):
    """Message of a completion."""

    content: str | None


class CompletionChoice(msgspec.Struct):
    """Choice of a completion."""

    message: Said


class Completion(msgspec.Struct):
    """Answer of a server, as far as it is read."""

    choices: list[CompletionChoice]


class Judge:
    """Asks the servers of a term."""

    def __init__(self, term: JudgeTerm, servers: Servers) -> None:
        self._term = term
        self._servers = servers
        self.at_once = term.at_once

    async def __call__(self, request: ScoringRequest) -> Reward:
        """1.0 or 0.0, with what the judge said last."""
        seen = request.response.rpartition("</think>")[2].strip()[-self._term.chars :]
        said = ""
        for first, second in ((request.answer, seen), (seen, request.answer)):
            said = await self._ask(QUESTION.format(problem=request.prompt, first=first, second=second))
            word = WORD.search(said)
            if word is None:
                raise NoValueError(f"the judge ended with neither yes nor no: {said[-SHOWN:]!r}")
            if word[1].lower() == "no":
                return Reward(0.0, text=f"the judge: {said[-SHOWN:]}")
        return Reward(1.0, text=f"the judge: {said[-SHOWN:]}")

    async def _ask(self, question: str) -> str:
        term = self._term
        body = {
            "model": term.model or term.servers,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": term.max_tokens,
            "temperature": 0.0,
        }
        choices = (await self._servers.ask("chat/completions", body, Completion)).choices
        if not choices or not choices[0].message.content:
            raise NoValueError("the judge said nothing")
        return choices[0].message.content


@asynccontextmanager
async def open_judge(term: JudgeTerm, context: ServeContext) -> AsyncIterator[ServedReward]:
    """A judge while its connections are open."""
    async with open_servers(term, context, below="/v1") as servers:
        yield Judge(term, servers)


JUDGE = RewardKind(settings=JudgeTerm, serve=open_judge, caches=True, fault=missing_answer)
