"""Reasoning of a model: the text between `<think>` and `</think>`. Rewards, environments, tools and agents use it.

A response starts inside reasoning if the text before it ends with an open `<think>`, as some templates write
it. `opened_reasoning` derives that from the text, so no setting does (`tests/reward/test_reasoning.py`).
"""

import re

TAGS = ("<think>", "</think>")
THINK_TAG = re.compile(f"({'|'.join(TAGS)})")
OPENED = re.compile(r"<think>\s*\Z")


def opened_reasoning(before: str) -> str:
    """Return the open `<think>` at the end of a text, with the space behind it; "" if there is none."""
    opened = OPENED.search(before)
    return opened[0] if opened else ""


def after_reasoning(text: str) -> str:
    """Return the text behind the last `</think>`, or all of it without tags; "" if the reasoning does not end."""
    *before, after = THINK_TAG.split(text)
    return "" if before[-1:] == ["<think>"] else after
