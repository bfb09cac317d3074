"""Answers as streams of server-sent events, for clients that ask for a stream. `endpoint` uses them.

A turn comes whole, in one event, once the model has ended it; comments keep the connection alive until then.
"""

import asyncio
from typing import Any

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


class EventStream:
    """The stream of events that answers one request."""

    def __init__(self, waiting: AgentRequest, body: AnyRequest, words: Words) -> None:
        self._waiting = waiting
        self._body = body
        self._bodies = Bodies(words)
        self._is_chat = isinstance(body, ChatRequest)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Send the whole answer. An error before the first comment is raised, so that the client gets a status."""
        await self._wait_for_answer()
        if self._waiting.answer.done():
            self._waiting.answer.result()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        while not self._waiting.answer.done():
            await response.write(b": working\n\n")
            await self._wait_for_answer()
        await response.write(self._events() + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _wait_for_answer(self) -> None:
        """Wait for the answer, at most `KEEP_ALIVE_S`."""
        await asyncio.wait([self._waiting.answer], timeout=KEEP_ALIVE_S)

    def _events(self) -> bytes:
        """Return the event with the answer, and the event with the usage if the client wants it."""
        if error := self._waiting.answer.exception():
            return _event(error_body(error))
        answer = self._waiting.answer.result()
        ids, values = answer.ids.tolist(), answer.logprobs.tolist()
        wants = isinstance(self._body, ChatRequest) and bool(self._body.logprobs) and len(values) == len(ids)
        logprobs = self._bodies.token_logprobs(ids, values) if wants else None
        text, calls = answer.message["content"] or "", _numbered(answer.message)
        delta: dict[str, Any] = {"content": text or None if calls else text, "role": "assistant"}
        if calls:
            delta["tool_calls"] = calls
        said = {"delta": delta} if self._is_chat else {"text": text}
        numbers = {"token_ids": ids} if self._body.return_token_ids else {}
        choice = {"index": 0, **said, "finish_reason": finish_of(answer), "logprobs": logprobs, **numbers}
        event = _event({**self._head, "choices": [choice]})
        if self._body.stream_options is None or not self._body.stream_options.include_usage:
            return event
        return event + _event({**self._head, "choices": [], "usage": usage_of([answer])})

    @property
    def _head(self) -> dict[str, Any]:
        return head(self._waiting.digest.hex(), "chat.completion.chunk" if self._is_chat else "text_completion")


def _numbered(message: Any) -> list[dict[str, Any]] | None:
    calls = message.get("tool_calls")
    return None if not calls else [{"index": place, **call} for place, call in enumerate(calls)]


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {to_json(body)}\n\n".encode()
