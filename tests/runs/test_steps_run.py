"""A run whose reward scores steps: those that are finished are scored while their response still generates."""

import asyncio
import json
import math

from aiohttp import web

from laminar_lab.audit.verify import verify
from tests.runs.runs import ALONE, TrainProcess

SEPARATOR, LABELS = 2, [5, 6]  # of the quickstart's vocabulary
LONG = ("warm_start.steps=3", "rollout.sampling.max_new_tokens=344", "rollout.partial_interval_s=0.2", "steps=3")


async def test_finished_steps_are_scored_while_their_response_still_generates(tmp_path):
    continued = []

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        ids, start = body["input_ids"], body["logprob_start_len"]
        continued.append(SEPARATOR in ids[:start])
        labels = [[math.log(0.8), LABELS[0], None], [math.log(0.2), LABELS[1], None]]
        rows = [labels] * (len(ids) - start)
        found = {"input_token_ids_logprobs": [None, *rows[1:]], "output_token_ids_logprobs": rows[:1]}
        return web.json_response({"meta_info": found})

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    term = {"kind": "steps", "urls": [url], "ends": ";", "separator_id": SEPARATOR, "labels": LABELS}
    settings = (*ALONE, *LONG, "eval.sets={}", f"reward.use={json.dumps([term])}")
    with TrainProcess(tmp_path, *settings) as run:
        code, output = await asyncio.to_thread(run.finish)
    await runner.cleanup()
    assert code == 0, output
    assert any(continued), "steps before those that were asked for had their scores"
    assert verify(run.run) == []
