"""The agent of tiny_agent, which takes its time and writes down each answer, and each error that it meets."""

import asyncio
import os
import random
import sys
from pathlib import Path
from typing import Any

import openai

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny_agent"))
from game import GUESSES, QUESTION, hint
from noted import note

MEDIAN_S, SIGMA = 0.1, 1.0

client = openai.AsyncOpenAI()
chat_api = client.chat


async def run(problem: dict[str, Any]) -> float:
    """Play one game; 1.0 where the number was found."""
    try:
        return await play(problem)
    except openai.OpenAIError as error:
        note(problem, "error", f"{type(error).__name__} {getattr(error, 'status_code', '')}")
        raise


async def play(problem: dict[str, Any]) -> float:
    """The game, answer by answer."""
    chat = client.with_options(api_key=os.environ["OPENAI_API_KEY"]).chat
    secret = int(problem["answer"])
    said = [{"role": "user", "content": QUESTION}]
    for turn in range(GUESSES):
        await asyncio.sleep(random.lognormvariate(0.0, SIGMA) * MEDIAN_S)
        answer = (await chat.completions.create(model="policy", messages=said)).choices[0].message.content or ""
        note(problem, str(turn), repr(answer))
        if answer.strip() == str(secret):
            return 1.0
        said += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": hint(answer.strip(), secret)},
        ]
    return 0.0
