"""The term `judge`: a language model behind an OpenAI-compatible server says whether two answers are the same.

Rules are more precise than judges, and a policy learns to please a judge. So ask one only where the rules reject,
with `unless`. The judge gets the question twice, with the two answers in either order, and must say yes twice.

**Servers.** Calls go over HTTP to the least busy server. The addresses come from the config, or from the
controller if the run launches the servers. After a failed call a server gets no call for `REST_S` seconds. Without
that pause a crashed server, which has no calls in flight, would draw all of them.
"""

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from http.client import HTTPException
from typing import ClassVar, Self, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

import aiohttp
import msgspec
from pydantic import model_validator

from laminar_contrib.text_terms import missing_answer
from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.reward import RewardKind, ServeContext, ServedReward, TermConfig
from laminar_py.config.section import ConfigError, Count, Seconds
from laminar_py.records.patience import Patience
from laminar_py.records.scoring import NoValueError, Reward, ScoringRequest, ServerAddress, TryAgainError

BUSY = {408, 425, 429, 500, 502, 503, 504}
ANSWER_S = 5.0  # for a server to answer before a run
REST_S = 5.0  # pause of a server that failed, if there is another
MOST_BYTES = 8 << 20  # of a server's reply
T = TypeVar("T")


class AskingTerm(TermConfig):
    """Settings of a term that calls servers over HTTP."""

    urls: tuple[str, ...] = ()
    """Servers that somebody else runs, e.g. `[http://10.0.0.4:30000]`; calls go to the least busy."""
    servers: str | None = None
    """Name of a pool in `reward.servers`, which the run launches, in place of `urls`."""
    key: str | None = None
    """Environment variable with the key of `urls`, one of those in `reward.env`."""
    timeout_s: Seconds | None = 60.0
    """Longest time of a call for one response; null: `reward.timeout_s`."""
    at_once: Count = 32
    """Responses that each scorer asks about at a time."""
    asks_servers: ClassVar[bool] = True

    @property
    def pool(self) -> str | None:
        """See `TermConfig.pool`."""
        return self.servers

    @model_validator(mode="after")
    def _check_servers(self) -> Self:
        """Raise `ConfigError` unless either valid URLs or a launched pool is given."""
        wrong = next((url for url in self.urls if not url.startswith(("http://", "https://"))), None)
        if wrong is not None:
            raise ConfigError(f"urls={wrong}: no URL; write for example http://10.0.0.4:30000")
        if bool(self.urls) == (self.servers is not None):
            raise ConfigError(
                f"urls of {self.title}: {'both' if self.urls else 'neither'} of urls and servers set; give urls"
                " of running servers, or `servers`, a name in reward.servers"
            )
        if self.servers is not None and self.key is not None:
            raise ConfigError(f"key={self.key}: launched servers have keys of their own; leave it out")
        return self


def check_urls(term: AskingTerm, sandbox: SandboxConfig) -> None:
    """Refuse servers of `urls` that do not answer a request. Raises `ConfigError`."""
    opener = build_opener(ProxyHandler({}))  # scorers use no proxy either
    for url in term.urls:
        try:
            with suppress(HTTPError), opener.open(url, timeout=ANSWER_S):
                pass
        except (OSError, HTTPException) as error:
            why = error.reason if isinstance(error, URLError) else error
            raise ConfigError(
                f"reward.use: urls={url} of {term.title}: does not answer ({why}); start it or mend the address"
            ) from None


class Servers:
    """Servers of one model. `present` waits until a server is up, and returns the addresses of all.

    `patience` makes the limit of calls to a server.
    """

    def __init__(
        self,
        present: Callable[[], Awaitable[Sequence[ServerAddress]]],
        session: aiohttp.ClientSession,
        patience: Callable[[], Patience],
    ) -> None:
        self._present = present
        self._session = session
        self._patience = defaultdict[str, Patience](patience)  # by URL
        self._calls = Counter[str]()  # under way, by URL
        self._failed_s = dict[str, float]()  # by URL, on the loop's clock

    async def post_json(self, path: str, body: Mapping[str, object], answer: type[T]) -> T:
        """POST a body to the least busy server and decode its answer.

        Waits until a server is up. Raises `TryAgainError` if a retry may succeed, else `NoValueError`.
        """
        servers = await self._present()
        server = min(servers, key=lambda address: (self._is_resting(address.url), self._calls[address.url]))
        url = f"{server.url.rstrip('/')}/{path}"
        self._calls[server.url] += 1
        try:
            patience = self._patience[server.url]
            async with patience.timer():
                status, content = await self._post_once(url, server.key, msgspec.json.encode(body))
            if status not in BUSY:
                patience.note_answer()
        except (TimeoutError, aiohttp.ClientError) as error:
            self._failed_s[server.url] = asyncio.get_running_loop().time()
            words = str(error) or type(error).__name__
            reason = "no answer in its timeout_s" if isinstance(error, TimeoutError) else words
            raise TryAgainError(f"{url}: {reason}") from error
        finally:
            self._calls[server.url] -= 1
        if status in BUSY:
            self._failed_s[server.url] = asyncio.get_running_loop().time()
            raise TryAgainError(f"{url}: status {status}")
        if status != 200:
            raise NoValueError(f"{url}: status {status}: {content[:200].decode(errors='replace')}")
        try:
            return msgspec.json.decode(content, type=answer)
        except msgspec.DecodeError as error:
            raise NoValueError(f"{url}: another answer than expected ({error})") from error

    def _is_resting(self, url: str) -> bool:
        failed_s = self._failed_s.get(url)
        return failed_s is not None and asyncio.get_running_loop().time() - failed_s < REST_S

    async def _post_once(self, url: str, key: str | None, data: bytes) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        async with self._session.post(url, data=data, headers=headers) as reply:
            content = bytearray()
            async for part in reply.content.iter_any():
                content += part
                if len(content) > MOST_BYTES:
                    raise NoValueError(f"{url}: a reply of more than {MOST_BYTES >> 20} MiB")
            return reply.status, bytes(content)


@asynccontextmanager
async def open_servers(term: AskingTerm, context: ServeContext, *, below: str = "") -> AsyncIterator[Servers]:
    """Open an HTTP session to the servers of a term.

    `below` is the path, e.g. "/v1", that follows the address of a launched server. Raises `ConfigError` if the
    variable `key` is not among `reward.env`.
    """
    pool, key = term.servers, term.key
    if key is not None and key not in context.env:
        raise ConfigError(f"key={key}: no such variable among reward.env; set it and name it there")
    given = [ServerAddress(url, None if key is None else context.env[key]) for url in term.urls]

    async def present() -> Sequence[ServerAddress]:
        if pool is None:
            return given
        return [ServerAddress(address.url + below, address.key) for address in await context.addresses(pool)]

    async with aiohttp.ClientSession(
        headers={"Content-Type": "application/json"},
        timeout=aiohttp.ClientTimeout(total=None),
        # a server closes idle connections just when they are used again
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
    ) as session:
        yield Servers(present, session, lambda: Patience(context.timeout_s, first_s=context.start_s))


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
    """Tokens that it may say; a longer reply gives no value."""
    at_once: Count = 64
    """Responses that each scorer asks about at a time."""

    @property
    def asked_unless(self) -> str | None:
        """Name of the term whose rejected responses the judge reads; None: the judge reads all."""
        return self.unless

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if (self.model is None) == bool(self.urls):
            raise ConfigError(
                f"model={self.model}: name a model for a judge at `urls`, and none for a judge in reward.servers"
            )
        return self


class Said(msgspec.Struct):
    """Message of a completion, as far as we read it."""

    content: str | None


class CompletionChoice(msgspec.Struct):
    """Choice of a completion, as far as we read it."""

    message: Said
    finish_reason: str | None = None  # "stop" if the judge ended its reply by itself


class Completion(msgspec.Struct):
    """A chat completion, as far as we read it."""

    choices: list[CompletionChoice]


class Judge:
    """Asks a judge at the servers of a term."""

    def __init__(self, term: JudgeTerm, servers: Servers) -> None:
        self._term = term
        self._servers = servers
        self.concurrency = term.at_once

    async def __call__(self, request: ScoringRequest) -> Reward:
        """Return 1.0 or 0.0, with the end of the judge's reply as text."""
        seen = request.text_after_reasoning.strip()[-self._term.chars :]
        if not seen:
            return Reward(0.0, text="no answer after the reasoning")
        said = ""
        for first, second in ((request.answer, seen), (seen, request.answer)):
            said = await self._ask_judge(QUESTION.format(problem=request.prompt, first=first, second=second))
            word = WORD.search(said)
            if word is None:
                raise NoValueError(f"the judge ended with neither yes nor no: {said[-SHOWN:]!r}")
            if word[1].lower() == "no":
                return Reward(0.0, text=f"the judge: {said[-SHOWN:]}")
        return Reward(1.0, text=f"the judge: {said[-SHOWN:]}")

    async def _ask_judge(self, question: str) -> str:
        """Ask the judge a question and return its reply. Raises `NoValueError` if it is empty or was cut."""
        term = self._term
        body = {
            "model": term.model or term.servers,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": term.max_tokens,
            "temperature": 0.0,
        }
        choices = (await self._servers.post_json("chat/completions", body, Completion)).choices
        if not choices or not choices[0].message.content:
            raise NoValueError("the judge sent a completion without text")
        if choices[0].finish_reason != "stop":
            cause = f"max_tokens={term.max_tokens}" if choices[0].finish_reason == "length" else "its server"
            raise NoValueError(f"{cause} cut the judge's reply: {choices[0].message.content[-SHOWN:]!r}")
        return choices[0].message.content


@asynccontextmanager
async def open_judge(term: JudgeTerm, context: ServeContext) -> AsyncIterator[ServedReward]:
    """Open the connections of a judge."""
    async with open_servers(term, context, below="/v1") as servers:
        yield Judge(term, servers)


JUDGE = RewardKind(settings=JudgeTerm, serve=open_judge, caches=True, check=check_urls, fault=missing_answer)
