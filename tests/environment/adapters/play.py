"""An agent that has `verifiers` play once: `play.py TASKSET [RENDERER]`, both JSON; it prints its branches.

With a renderer it speaks to the endpoint in tokens, by the client for training; else in messages.
"""

import asyncio
import json
import os
import sys
from urllib.request import Request, urlopen

import verifiers.v1 as vf

ENDPOINT = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key_var": "OPENAI_API_KEY"}


def client_of(renderer):
    if renderer is None:
        return vf.EvalClientConfig(**ENDPOINT)
    return vf.TrainClientConfig(**ENDPOINT, renderer=renderer, renderer_model_name=os.environ["LAMINAR_MODEL"])


async def play(taskset, client):
    env = vf.load_environment(vf.env_config_type(taskset["id"])(taskset=taskset))
    async with env.serving():
        (task,) = env.taskset
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    (trace,) = episode.traces
    assert episode.ok, [*episode.errors, *trace.errors]
    return trace


def main(taskset, renderer="null"):
    with open(os.environ["LAMINAR_PROBLEM"]) as file:
        problem = json.load(file)
    given = json.loads(taskset)
    fields = vf.taskset_config_type(given["id"]).model_fields
    own = {name: problem[name] for name in ("prompt", "answer") if name in fields}
    trace = asyncio.run(play({**given, **own}, client_of(json.loads(renderer))))
    for branch in trace.branches:
        told = {"ids": branch.token_ids, "sampled": branch.sampled_mask, "logprobs": branch.logprobs}
        told["said"] = [message.content for message in branch.messages]
        sys.stdout.write(f"{json.dumps(told)}\n")
    request = Request(f"{ENDPOINT['base_url']}/reward", json.dumps({"reward": trace.reward}).encode())
    request.add_header("Authorization", f"Bearer {os.environ['OPENAI_API_KEY']}")
    urlopen(request).close()


if __name__ == "__main__":
    main(*sys.argv[1:])
