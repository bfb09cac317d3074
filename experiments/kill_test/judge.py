"""A judge for the kill test: `python experiments/kill_test/judge.py PORT`, OpenAI's chat completions on this host.

The digest of a question throws a coin, so that the same question has the same verdict after every death.
"""

import asyncio
import sys
from hashlib import blake2b

from aiohttp import web

PAUSE_S = 0.02  # for an answer, so that some are on their way at any time


async def complete(request: web.Request) -> web.Response:
    """Yes or no."""
    question = (await request.json())["messages"][0]["content"]
    await asyncio.sleep(PAUSE_S)
    word = "yes" if blake2b(question.encode()).digest()[0] % 4 else "no"
    return web.json_response(
        {"choices": [{"message": {"role": "assistant", "content": word}, "finish_reason": "stop"}]}
    )


async def models(request: web.Request) -> web.Response:
    """Names of the models."""
    return web.json_response({"object": "list", "data": [{"id": "coin"}]})


if __name__ == "__main__":
    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", models)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
