"""An episode: one model plays both sides of a game. It knows the `openai` package, and nothing of training."""

import os
from itertools import cycle
from typing import Any

from game import PLAYERS, left, question
from openai import OpenAI

client = OpenAI()  # made once: each agent is a fork of the process that imported this file
chat_api = client.chat  # loads what it needs


def run(problem: dict[str, Any]) -> dict[str, float]:
    """Play one game; 1.0 for the role that has won."""
    chat = client.with_options(api_key=os.environ["OPENAI_API_KEY"], max_retries=5).chat
    pile: int | None = int(problem["answer"])
    for mover, other in cycle((PLAYERS, PLAYERS[::-1])):
        messages = [{"role": "user", "content": question(pile)}]
        said = chat.completions.create(model=mover, messages=messages).choices[0].message.content or ""
        print(f"{mover}: {pile} left, {said}")
        pile = left(pile, said)
        if pile is None:
            return {mover: 0.0, other: 1.0}
        if pile == 0:
            return {mover: 1.0, other: 0.0}
    raise AssertionError("a game ends")
