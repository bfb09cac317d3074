"""Answers as streams of server-sent events, token by token. `endpoint` uses them.

The texts of a stream together are the text of the turn (`tests/environment/agents/test_agents.py`). Half a
character waits for its other half, and a tool call comes with the last event.
"""

import asyncio
import contextlib
from typing import Any

import numpy as np
from aiohttp import web

from laminar_contrib.agents.agent import AgentRequest
from laminar_contrib.agents.bodies import (
    AnyRequest,
    Bodies,
    ChatRequest,
    error_body,
    finish_of,
    head,
    to_json,
    usage_of,
)
from laminar_py.config.environment import Words

KEEP_ALIVE_S = 10.0
UNFINISHED = "\ufffd"  # the decoder's character for bytes of half a character


class TextParts:
    """Decodes tokens as they arrive, e.g. `parts.push([31, 7])`."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._ids: list[int] = []
        self._start = self._sent = 0  # tokens that were sent; the last of them, from `_start` on, serve as context

    def push(self, ids: list[int]) -> str:
        """Add tokens and return the new text that further tokens cannot change."""
        self._ids += ids
        before = self._text_of(self._ids[self._start : self._sent])
        text = self._text_of(self._ids[self._start :])
        if text.endswith(UNFINISHED) or len(text) < len(before):
            return ""
        self._start, self._sent = self._sent, len(self._ids)
        return text[len(before) :]

    def _text_of(self, ids: list[int]) -> str:
        return self._words.decode_turn(np.array(ids, np.int32)) if ids else ""


class EventStream:
    """The stream of events that answers one request."""

    def __init__(self, waiting: AgentRequest, body: AnyRequest, words: Words) -> None:
        self._waiting = waiting
        self._body = body
        self._bodies = Bodies(words)
        self._parts = TextParts(words)
        self._is_chat = isinstance(body, ChatRequest)
        self._name = waiting.digest.hex()
        self._has_begun = False
        self._sent = ""
        self._place = 0  # number of tokens that were sent

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Send the whole answer. An error before the first event is raised, so that the client gets a status."""
        await self._wait_for_tokens()
        if self._waiting.answer.done():
            self._waiting.answer.result()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        while not self._waiting.answer.done():
            await response.write(self._next_event() or b": working\n\n")
            await self._wait_for_tokens()
        await response.write(self._last_events() + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _wait_for_tokens(self) -> None:
        """Wait for new tokens or the answer, at most `KEEP_ALIVE_S`."""
        if len(self._waiting.ids) > self._place or self._waiting.answer.done():
            return
        self._waiting.news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEEP_ALIVE_S):
                await self._waiting.news.wait()

    def _next_event(self) -> bytes:
        """Return an event with the tokens since the last event; b"" if there are none."""
        ids, values = self._waiting.ids[self._place :], self._waiting.logprobs[self._place :]
        self._place += len(ids)
        text = self._parts.push(ids)
        self._sent += text
        return self._event(text, ids, values) if ids else b""

    def _last_events(self) -> bytes:
        """Return the last events: the rest of the text, tool calls, finish reason and usage."""
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
        """Encode one event of a stream: new text with its ids and log-probabilities, tool calls, or the end."""
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
    return f"data: {to_json(body)}\n\n".encode()
