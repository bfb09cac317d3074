"""Requests of agents to their model: a conversation of messages, or of tokens. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from laminar_py.environment.agents.conversation import Conversation, Message
from laminar_py.environment.agents.token_paths import TokenPaths
from laminar_py.environment.protocol import Observation, Rewrite, TokenWords
from laminar_py.records.codec import IntArray


@dataclass(slots=True)
class AgentHistory:
    """Requests of an agent so far, by the turns that answer them."""

    conversation: Conversation
    paths: TokenPaths


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, the last of which the model answers, and tools that it may call."""

    messages: Sequence[Message]
    tools: Sequence[Message]
    max_tokens: int | None = None  # the most of the turn that answers it

    @property
    def has_tools(self) -> bool:
        """True where a turn may call tools."""
        return bool(self.tools)

    def join(self, history: AgentHistory, *, turn: int) -> Observation | Rewrite:
        """Words to the model, whose turn answers them."""
        words = history.conversation.join(self.messages, self.tools, turn=turn)
        return replace(words, max_tokens=self.max_tokens)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Tokens that the model goes on behind."""

    ids: IntArray  # [n]
    max_tokens: int | None = None  # the most of the turn that answers it
    has_tools: bool = False

    def join(self, history: AgentHistory, *, turn: int) -> TokenWords:
        """Words to the model, whose turn answers them."""
        return replace(history.paths.join(self.ids), max_tokens=self.max_tokens)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that the model goes on behind, as it stands."""

    text: str
    max_tokens: int | None = None  # the most of the turn that answers it
    has_tools: bool = False

    def join(self, history: AgentHistory, *, turn: int) -> TokenWords:
        """Words to the model, whose turn answers them."""
        return replace(history.paths.join_text(self.text), max_tokens=self.max_tokens)


Prompt = Chat | TokenPrompt | TextPrompt
