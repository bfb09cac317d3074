"""Answers as streams of server-sent events, token by token where a turn is listened to. Called by `endpoint`.

Invariant: the texts of a stream are together the text of the turn; what cannot be told yet, such as half a
character, or a call of a tool, comes with what ends it.
"""

import asyncio
import contextlib
from typing import Any

import numpy as np
from aiohttp import web

from laminar_py.config.environment import Words
from laminar_py.environment.agents.agent import AgentRequest
from laminar_py.environment.agents.bodies import (
    AnyRequest,
    Bodies,
    ChatRequest,
    encoded,
    error_body,
    finish_of,
    head,
    usage_of,
)

KEEP_ALIVE_S = 10.0
UNFINISHED = "\ufffd"  # of bytes that are no whole character yet


class TextParts:
    """Text of tokens as they come, e.g. `parts.push([31, 7])`."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._ids: list[int] = []
        self._start = self._told = 0  # tokens whose text was told, and of these the last few for what is around

    def push(self, ids: list[int]) -> str:
        """Text that is sure once these are there, too."""
        self._ids += ids
        before = self._said(self._ids[self._start : self._told])
        text = self._said(self._ids[self._start :])
        if text.endswith(UNFINISHED) or len(text) < len(before):
            return ""
        self._start, self._told = self._told, len(self._ids)
        return text[len(before) :]

    def _said(self, ids: list[int]) -> str:
        return self._words.said(np.array(ids, np.int32)) if ids else ""


class EventStream:
    """The events of one request's answer."""

    def __init__(self, waiting: AgentRequest, body: AnyRequest, words: Words) -> None:
        self._waiting = waiting
        self._body = body
        self._bodies = Bodies(words)
        self._parts = TextParts(words)
        self._is_chat = isinstance(body, ChatRequest)
        self._name = waiting.digest.hex()
        self._has_begun = False
        self._sent = ""
        self._place = 0  # tokens that were sent

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Send all of it. Raises what the answer does where nothing was sent yet, so that a status says it."""
        await self._news()
        if self._waiting.answer.done():
            self._waiting.answer.result()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        while not self._waiting.answer.done():
            await response.write(self._part() or b": working\n\n")
            await self._news()
        await response.write(self._end() + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _news(self) -> None:
        """Until more was sampled than was sent, or a while has passed."""
        if len(self._waiting.ids) > self._place or self._waiting.answer.done():
            return
        self._waiting.news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEEP_ALIVE_S):
                await self._waiting.news.wait()

    def _part(self) -> bytes:
        """Event with what was sampled since the last; nothing where that has no text yet."""
        ids, values = self._waiting.ids[self._place :], self._waiting.logprobs[self._place :]
        self._place += len(ids)
        text = self._parts.push(ids)
        self._sent += text
        return self._event(text, ids, values) if ids else b""

    def _end(self) -> bytes:
        """Events with all that is left."""
        if error := self._waiting.answer.exception():
            return _event(error_body(error))
        answer = self._waiting.answer.result()
        ids, values = answer.ids.tolist()[self._place :], answer.logprobs.tolist()[self._place :]
        whole = answer.message["content"] or ""
        rest = whole.removeprefix(self._sent) if whole.startswith(self._sent) else ""
        finish = finish_of(answer)
        last = self._event(rest, ids, values, calls=_numbered(answer.message), finish=finish)
        if self._body.stream_options is None or not self._body.stream_options.include_usage:
            return last
        return last + _event({**self._head, "choices": [], "usage": usage_of([answer])})

    def _event(
        self,
        text: str,
        ids: list[int],
        values: list[float],
        *,
        calls: list[dict[str, Any]] | None = None,
        finish: str | None = None,
    ) -> bytes:
        wants = isinstance(self._body, ChatRequest) and bool(self._body.logprobs) and len(values) == len(ids)
        logprobs = self._bodies.token_logprobs(ids, values) if wants else None
        delta: dict[str, Any] = {"content": text or None if calls else text}
        if not self._has_begun:
            delta["role"], self._has_begun = "assistant", True
        if calls:
            delta["tool_calls"] = calls
        said = {"delta": delta} if self._is_chat else {"text": text}
        numbers = {"token_ids": ids} if self._body.return_token_ids else {}
        choice = {"index": 0, **said, "finish_reason": finish, "logprobs": logprobs, **numbers}
        return _event({**self._head, "choices": [choice]})

    @property
    def _head(self) -> dict[str, Any]:
        return head(self._name, "chat.completion.chunk" if self._is_chat else "text_completion")


def _numbered(message: Any) -> list[dict[str, Any]] | None:
    calls = message.get("tool_calls")
    return None if not calls else [{"index": place, **call} for place, call in enumerate(calls)]


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {encoded(body)}\n\n".encode()
