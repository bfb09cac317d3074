"""Answers of environments as records for replicas. `environment.host` calls it; its functions change nothing."""

from collections.abc import Mapping

from laminar_py.environment.calls import CallFailedError
from laminar_py.environment.protocol import Answer, Begin, End, Observation, Rewrite, TokenPrompt
from laminar_py.environment.writer import PlainWriter
from laminar_py.records.codec import IntArray
from laminar_py.records.credit import credits_of
from laminar_py.records.environment import EnvironmentTurn, ModelTurn
from laminar_py.records.spans import NEW_CONVERSATION, Span, turn_ends
from laminar_py.records.trajectory import DropReason


def encode_answer(
    answer: Answer, writer: PlainWriter, *, response_ids: IntArray, spans: tuple[Span, ...], elapsed_s: float
) -> EnvironmentTurn:
    """Encode an environment's answer to the last turn of a response; without turns, the answer of `reset`.

    Raises `CallFailedError` if the answer is invalid.
    """
    is_first = not turn_ends(spans)
    if isinstance(answer, End):
        if is_first:
            raise _invalid("reset returned End; return an Observation")
        return _encode_end(answer, num_turns=len(turn_ends(spans)), elapsed_s=elapsed_s)
    if isinstance(answer, Observation) and not is_first and not answer.messages:
        raise _invalid("step returned an Observation without a text; return End to end")
    follows = _position(answer, spans)
    before = response_ids[: (spans[-1].end if spans else 0) if follows is None else max(follows, 0)]
    is_cut = len(before) > 0 and not writer.has_ended(before)
    ids = _encode_messages(answer, writer, is_first=is_first, is_cut=is_cut)
    if not len(ids) and (not isinstance(answer, Observation) or not is_first):
        raise _invalid("step returned an empty text; return End to end")
    if not len(ids) and (answer.max_tokens is not None or answer.stop):
        given = f"stop={answer.stop}" if answer.max_tokens is None else f"max_tokens={answer.max_tokens}"
        raise _invalid(f"reset returned {given} without a text; give a text, with which the limit is kept")
    limit, stop = answer.max_tokens, answer.stop
    return EnvironmentTurn(ids=ids, follows=follows, max_tokens=limit, stop=stop, elapsed_s=elapsed_s)


def is_recorded_answer(answer: EnvironmentTurn, turn: ModelTurn, *, start: int) -> bool:
    """Return True if an answer equals the answer that the response has from position `start` on."""
    spans = [span for span in turn.spans if span.start == start and span.version is None]
    recorded = spans[0] if spans else Span(None, start, start)
    ids = turn.response_ids[start : recorded.end].tolist()
    fields = (answer.follows, answer.max_tokens, answer.stop)
    is_same = fields == (recorded.follows, recorded.turn_limit, recorded.stop)
    return answer.ids is not None and answer.ids.tolist() == ids and is_same


def _encode_end(end: End, *, num_turns: int, elapsed_s: float) -> EnvironmentTurn:
    """Encode the end of a trajectory. Raises `CallFailedError` if its roles do not match its turns or rewards."""
    if not isinstance(end.reward, Mapping):
        return EnvironmentTurn(ends=True, reward=end.reward, elapsed_s=elapsed_s)
    if len(end.roles) != num_turns:
        raise _invalid(
            f"End has {len(end.roles)} roles, but the model took {num_turns} turns; give one for each turn"
        )
    try:
        roles = credits_of(end.reward, end.roles)
    except ValueError as error:
        raise _invalid(str(error)) from None
    reward = sum(credit.reward for credit in roles)
    return EnvironmentTurn(ends=True, reward=reward, roles=roles, elapsed_s=elapsed_s)


def _encode_messages(messages: Begin, writer: PlainWriter, *, is_first: bool, is_cut: bool) -> IntArray:
    """Encode messages that follow a model's turn, or come first; `is_cut`: no stop token ended that turn."""
    try:
        if isinstance(messages, TokenPrompt):
            writer.check_ids(messages.ids)
            return messages.ids
        if isinstance(messages, Rewrite):
            return writer.encode_conversation(messages)
        return writer.encode_first(messages) if is_first else writer.encode_next(messages, is_cut=is_cut)
    except (ValueError, RecursionError) as error:
        raise _invalid(str(error)) from error


def _position(messages: Begin, spans: tuple[Span, ...]) -> int | None:
    """Return the end of the turn that messages follow, as a position in the response.

    `NEW_CONVERSATION`: they begin a new conversation. None: they follow the last turn. Raises `CallFailedError` if
    they name a turn that does not exist.
    """
    if isinstance(messages, Rewrite) or (isinstance(messages, TokenPrompt) and not messages.after):
        return NEW_CONVERSATION
    if messages.after is None:
        return None
    ends = turn_ends(spans)
    if messages.after > len(ends):
        name = type(messages).__name__
        raise _invalid(
            f"step returned {name} with after={messages.after} of {len(ends)} turns; name one of these turns"
        )
    end = ends[messages.after - 1]
    return None if end == spans[-1].end else end


def _invalid(detail: str) -> CallFailedError:
    return CallFailedError(DropReason.ENVIRONMENT_FAILED, detail)
