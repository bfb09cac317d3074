"""An agent that has `verifiers` play once, with its client for training; it prints the branches of the trace."""

import asyncio
import json
import os
import sys
from urllib.request import Request, urlopen

import verifiers.v1 as vf


async def play(problem, renderer):
    told = {"id": "sums", "prompt": problem["prompt"], "answer": problem["answer"]}
    env = vf.load_environment(vf.env_config_type("sums")(taskset=told))
    client = vf.TrainClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key_var="OPENAI_API_KEY",
        renderer=renderer,
        renderer_model_name=os.environ["LAMINAR_MODEL"],
    )
    async with env.serving():
        (task,) = env.taskset
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    (trace,) = episode.traces
    assert episode.ok, [*episode.errors, *trace.errors]
    return trace


if __name__ == "__main__":
    with open(os.environ["LAMINAR_PROBLEM"]) as file:
        trace = asyncio.run(play(json.load(file), json.loads(sys.argv[1])))
    for branch in trace.branches:
        told = {"ids": branch.token_ids, "sampled": branch.sampled_mask, "logprobs": branch.logprobs}
        told["said"] = [message.content for message in branch.messages]
        sys.stdout.write(f"{json.dumps(told)}\n")
    body = json.dumps({"reward": trace.reward}).encode()
    request = Request(f"{os.environ['OPENAI_BASE_URL']}/reward", body)
    request.add_header("Authorization", f"Bearer {os.environ['OPENAI_API_KEY']}")
    urlopen(request).close()
