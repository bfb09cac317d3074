"""Turns of the model as messages of the assistant, with the calls of tools that they make. Pure."""

import json

from laminar_py.environment.agents.conversation import Message
from laminar_py.environment.tool_calls import CallFormat, WrittenCall, outside_reasoning


class AssistantMessages:
    """Messages of a model whose calls are written so, e.g. `AssistantMessages(HermesCalls(), mark="<tool_call>")`.

    `mark` begins what is a call and no text.
    """

    def __init__(self, call_format: CallFormat, *, mark: str) -> None:
        self._format = call_format
        self._mark = mark

    def read(self, text: str, *, turn: int, has_tools: bool) -> Message:
        """The message of a turn; a call that cannot be read is text, as is each where the agent has no tools."""
        parsed = list(self._format.parse(outside_reasoning(text))) if has_tools else []
        calls = [call for call in parsed if isinstance(call, WrittenCall)]
        if not calls or len(calls) < len(parsed):
            return {"role": "assistant", "content": text}
        before = text.partition(self._mark)[0] if self._mark in text else ""
        return {
            "role": "assistant",
            "content": before.strip() or None,
            "tool_calls": [
                {
                    "id": f"call_{turn}_{place}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for place, call in enumerate(calls)
            ],
        }
