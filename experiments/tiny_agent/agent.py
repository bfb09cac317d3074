"""An agent that plays "guess my number" with its model. It knows the `openai` package, and nothing of training."""

import os
from typing import Any

from game import GUESSES, QUESTION, hint
from openai import OpenAI

client = OpenAI()  # made once: each agent is a fork of the process that imported this file
chat_api = client.chat  # loads what it needs


def run(problem: dict[str, Any]) -> float:
    """Play one game; 1.0 where the number was found."""
    chat = client.with_options(api_key=os.environ["OPENAI_API_KEY"], max_retries=5).chat
    secret = int(problem["answer"])
    said = [{"role": "user", "content": QUESTION}]
    for _ in range(GUESSES):
        answer = chat.completions.create(model="policy", messages=said).choices[0].message.content or ""
        print(answer)
        if answer.strip() == str(secret):
            return 1.0
        said.append({"role": "assistant", "content": answer})
        said.append({"role": "user", "content": hint(answer.strip(), secret)})
    return 0.0
