"""Environments of a process: every turn is taken once, whatever crashes, and each answer is checked."""

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from laminar_py.environment.protocol import End, Observation, Rewrite
from laminar_py.environment.saved_turns import SavedTurns
from laminar_py.records.spans import NEW_CONVERSATION
from laminar_py.records.trajectory import DropReason
from tests.environment.turns import (
    END,
    Chatter,
    Diary,
    Forgetful,
    Wanderer,
    appended,
    first_turn,
    make_host,
    problem,
)


class Story:
    """A trajectory as a replica leads it, turn by turn."""

    def __init__(self, host, *, turns=9, name="g0.0"):
        self.host = host
        self.turn = first_turn(problem(turns), name=name)

    def append(self, ids, version, follows=None, **limits):
        self.turn = appended(self.turn, ids, version, follows, **limits)

    async def ask(self):
        return await self.host.answer(self.turn)

    async def say(self, *ids):
        """The model says this; what the environment answers is appended."""
        if ids:
            self.append([*ids, END], 3)
        answer = await self.ask()
        if answer.ids is not None:
            self.append(answer.ids, None, answer.follows, limit=answer.max_tokens, stop=answer.stop)
        return answer


async def test_a_turn_is_taken_once_however_often_it_is_asked(tmp_path):
    Diary.steps.clear()
    story = Story(make_host(Diary, tmp_path))
    await story.say()
    story.append([1, 2, END], 3)
    first, second = await asyncio.gather(story.ask(), story.ask())
    third = await story.ask()
    assert first.ids.tolist() == second.ids.tolist() == third.ids.tolist()
    assert Diary.steps == ["ab"]


async def test_what_was_answered_is_answered_the_same_by_another_process(tmp_path):
    Diary.steps.clear()
    story = Story(make_host(Diary, tmp_path))
    await story.say()
    story.append([1, 2, END], 3)
    answer = await story.ask()
    story.host = make_host(Diary, tmp_path)
    assert (await story.ask()).ids.tolist() == answer.ids.tolist()
    assert Diary.steps == ["ab"], "no turn that was answered is taken twice"
    story.append(answer.ids, None)
    assert (await story.say(3)).failure is None, "it goes on from there"


async def test_an_environment_with_snapshots_goes_on_from_its_last(tmp_path):
    alone, moved = Story(make_host(Diary, tmp_path / "a")), Story(make_host(Diary, tmp_path / "b"))
    for story in (alone, moved):
        await story.say()
    Diary.steps.clear()
    for ids in ((1,), (2, 3), (4, 4, 4)):
        await alone.say(*ids)
        moved.host = make_host(Diary, tmp_path / "b")
        await moved.say(*ids)
    assert moved.turn.response_ids.tolist() == alone.turn.response_ids.tolist()
    assert len(Diary.steps) == 6, "each of the turns once"


@pytest.mark.parametrize("turns", [4, 5])  # with and without a word before the first
async def test_a_deterministic_environment_is_repeated(tmp_path, turns):
    story = Story(make_host(Chatter, tmp_path / "a"), turns=turns)
    await story.say()
    for place, ids in enumerate([(1,), (2, 3), (4,)]):
        story.host = make_host(Chatter, tmp_path / f"b{place}")  # where nothing is saved
        assert (await story.say(*ids)).ids is not None


async def test_a_conversation_that_goes_back_or_begins_anew_is_repeated_too(tmp_path):
    story = Story(make_host(Wanderer, tmp_path / "a"), turns=9)
    await story.say()
    for place in range(7):
        story.host = make_host(Wanderer, tmp_path / f"b{place}")
        assert (await story.say(1)).failure is None
    follows = [span.follows for span in story.turn.spans]
    assert NEW_CONVERSATION in follows, "it began anew"
    assert any(place is not None and place > 0 for place in follows), "it went back"


async def test_what_is_neither_ends_with_a_reason_and_so_does_what_answers_otherwise_again(tmp_path):
    story = Story(make_host(Forgetful, tmp_path / "a"))
    await story.say()
    await story.say(1)
    story.append([2, END], 3)
    story.host = make_host(Forgetful, tmp_path / "a")
    assert (await story.ask()).failure is DropReason.ENVIRONMENT_LOST

    class Fickle(Chatter):
        def step(self, action):
            return Observation("a" * (1 + time.monotonic_ns() % 97))

    class Late(Chatter):
        began = 0

        def reset(self, problem):
            super().reset(problem)
            Late.began += 1
            return Observation("a" if Late.began > 1 else ())

    story = Story(make_host(Late, tmp_path / "d"))
    await story.say()
    await story.say(1)
    story.append([2, END], 3)
    story.host = make_host(Late, tmp_path / "e")
    assert (await story.ask()).failure is DropReason.ENVIRONMENT_LOST

    story = Story(make_host(Fickle, tmp_path / "b"))
    await story.say()
    for _ in range(3):
        await story.say(1)
    story.append([2, END], 3)
    story.host = make_host(Fickle, tmp_path / "c")
    answer = await story.ask()
    assert answer.failure is DropReason.ENVIRONMENT_LOST
    assert "the replay answered turn" in answer.detail


async def test_the_longest_idle_make_room_and_are_rebuilt(tmp_path):
    host = make_host(Diary, tmp_path, most_kept=2)
    stories = [Story(host, name=f"g{number}.0") for number in range(5)]
    for story in stories:
        await story.say()
    Diary.steps.clear()
    for story in stories:
        await story.say(1, 2)
    assert Diary.steps == ["ab"] * 5


async def test_the_cap_on_turns_cuts(tmp_path):
    story = Story(make_host(Chatter, tmp_path, max_turns=2))
    await story.say()
    assert (await story.say(1)).ids is not None
    assert (await story.say(1)).is_cut


async def test_an_end_has_its_reward_and_is_answered_again_until_its_file_is_deleted(tmp_path):
    story = Story(make_host(Chatter, tmp_path), turns=1)
    await story.say()
    answer = await story.say(1, 2, 3)
    assert (answer.ends, answer.reward) == (True, 3.0)
    story.host.forget(["g0.0"])
    assert (await story.ask()).reward == 3.0
    saved = SavedTurns(tmp_path)
    assert saved.names() == ["g0.0"]
    saved.forget(saved.names())
    assert not list(tmp_path.iterdir())


def returning(value, *, first=None):
    class Given:
        def reset(self, problem):
            return Observation() if first is None else first

        def step(self, action):
            if isinstance(value, Exception):
                raise value
            return value() if callable(value) else value

    return Given


BAD = {  # what an environment makes as its answer, and a part of the reason
    "a limit of nothing": (
        lambda: Observation("b", max_tokens=0),
        "max_tokens: Input should be greater than or equal",
    ),
    "a limit that is no number": (
        lambda: Observation("b", max_tokens="64"),
        "max_tokens: Input should be a valid int",
    ),
    "a limit that is true": (lambda: Rewrite("b", max_tokens=True), "max_tokens: Input should be a valid integer"),
    "a limit of 400 digits": (lambda: Rewrite("b", max_tokens=10**400), "max_tokens: Input should be less than"),
    "a stop string of no letter": (lambda: Observation("b", stop=("",)), "stop: String should have at least 1"),
    "a stop string alone": (lambda: Rewrite("b", stop="ab"), "stop: Input should be a valid tuple"),
    "five stop strings": (lambda: Observation("b", stop=("a",) * 5), "stop: Tuple should have at most 4 items"),
    "a stop string of no Unicode": (
        lambda: Observation("b", stop=("\ud800",)),
        "stop: Input should be a valid string",
    ),
    "nothing": (lambda: None, "returned a NoneType; return an Observation, a Rewrite, a TokenPrompt or End"),
    "behind no turn": (lambda: Observation("4", after=0), "after: Input should be greater than or equal to 1"),
    "behind a turn to come": (
        lambda: Observation("b", after=2),
        "with after=2 of 1 turns; name one of these turns",
    ),
    "no messages": (lambda: Rewrite(()), "Tuple should have at least 1 item"),
    "tools that are none": (lambda: Rewrite("b", tools=5), "tools: Input should be a valid tuple"),
    "words of nobody": (
        lambda: Rewrite(({"role": "poet"},)),
        "role 'poet': choose one of system, assistant, user, tool",
    ),
    "messages for a text": (lambda: Rewrite((("user", "4"),)), "a Rewrite has messages where prompts are text"),
    "an empty rewrite": (lambda: Rewrite(""), "an empty text; return End to end"),
    "a text": (lambda: "4", "returned a str"),
    "no text": (Observation, "without a text; return End"),
    "100 MB": (lambda: Observation("a" * 100_000_000), "above environment.max_observation_bytes=65,536"),
    "many bytes": (lambda: Observation("é" * 40_000), "80,000 bytes, above"),
    "no Unicode": (lambda: Observation("\ud800"), "no Unicode"),
    "bytes": (lambda: Observation(b"4"), "Input should be a valid string"),
    "a stranger": (lambda: Observation("4", role="system"), "role: Input should be 'user' or 'tool'"),
    "no number": (lambda: End(float("nan")), "Input should be a finite number"),
    "a number as text": (lambda: End("1.0"), "a reward is a number, not a text"),
    "a role's number as text": (lambda: End({"a": "2"}, roles=("a",)), "a reward is a number, not a text"),
    "a number of 400 digits": (lambda: End(10**400), "Input should be a valid number"),
    "no role": (lambda: End({}), "should have at least 1 item"),
    "a role by number": (lambda: End({1: 1.0}, roles=(1,)), "Input should be a valid string"),
    "a role of no Unicode": (lambda: End({"a\ud800": 1.0}), "raised End: 0: "),
    "a role without a reward": (lambda: End({"a": 1.0}, roles=("b",)), "role 'b' has turns and no reward"),
    "turns without a role": (
        lambda: End({"a": 1.0}),
        "has 0 roles, but the model took 1 turns; give one for each turn",
    ),
    "an empty text": (lambda: Observation(""), "an empty text; return End to end"),
    "a time-out of its own": (TimeoutError("no answer"), "raised TimeoutError: no answer"),
    "an iterator's end": (StopIteration("no more"), "raised RuntimeError: StopIteration: no more"),
    "an error": (ValueError("on\ntwo lines"), "raised ValueError: on two lines"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_answer_is_one_line_that_names_it(tmp_path, name):
    value, words = BAD[name]
    story = Story(make_host(returning(value), tmp_path))
    await story.say()
    answer = await story.say(1)
    assert answer.failure is DropReason.ENVIRONMENT_FAILED
    assert words in answer.detail
    assert "\n" not in answer.detail
    assert len(answer.detail) <= 400


class Brief(Chatter):
    """Limits each turn to one token more than the one before."""

    more = 0

    def reset(self, problem):
        return replace(super().reset(problem), max_tokens=1)

    def step(self, action):
        return replace(super().step(action), max_tokens=2 + self.more + self.made)


async def test_the_limit_of_a_turn_is_told_and_the_same_again(tmp_path):
    story = Story(make_host(Brief, tmp_path / "a"))
    assert (await story.say()).max_tokens == 1
    assert [(await story.say(1)).max_tokens for _ in range(3)] == [3, 4, 5]
    story.append([2], 3)
    story.host = make_host(Brief, tmp_path / "b")
    assert (await story.ask()).max_tokens == 6, "it is repeated"

    class Longer(Brief):
        more = 1

    story.host = make_host(Longer, tmp_path / "c")
    answer = await story.ask()
    assert answer.failure is DropReason.ENVIRONMENT_LOST
    assert "the replay answered turn" in answer.detail


async def test_an_action_ends_before_its_stop_string_and_the_same_again(tmp_path):
    heard = []

    class Stops(Chatter):
        letter = "c"

        def reset(self, problem):
            return replace(super().reset(problem), stop=("d", self.letter))

        def step(self, action):
            heard.append(action)
            return replace(super().step(action), stop=(self.letter,))

    story = Story(make_host(Stops, tmp_path / "a"))
    assert (await story.say()).stop == ("d", "c")
    letters = {letter: story.host._writer._codec.encode(letter)[0] for letter in "abcd"}
    for said in ("abd", "adbc", "ab"):  # the replica cuts the second; the third has ended by itself
        story.append([*(letters[letter] for letter in said), *([END] if said == "ab" else [])], 3)
        story.append((answer := await story.ask()).ids, None, answer.follows, stop=answer.stop)
    assert heard == ["ab", "adb", "ab"]
    story.append([letters["c"]], 3)
    story.host = make_host(Stops, tmp_path / "b")
    assert (await story.ask()).stop == ("c",)
    assert heard[3:] == ["ab", "adb", "ab", ""], "it is repeated"

    class Others(Stops):
        letter = "b"

    story.host = make_host(Others, tmp_path / "c")
    assert "the replay answered turn" in (await story.ask()).detail


@pytest.mark.parametrize(
    ("limits", "words"), [({"max_tokens": 5}, "max_tokens=5"), ({"stop": ("a",)}, "stop=('a',)")]
)
async def test_a_limit_without_a_word_to_keep_it_with_is_refused(tmp_path, limits, words):
    answer = await Story(make_host(returning(End(), first=Observation(**limits)), tmp_path)).say()
    assert answer.failure is DropReason.ENVIRONMENT_FAILED
    assert answer.detail == f"reset returned {words} without a text; give a text, with which the limit is kept"


async def test_an_end_has_the_rewards_of_its_roles_and_their_turns(tmp_path):
    story = Story(make_host(returning(End({"a": 1, "b": 0.5}, roles=["a"])), tmp_path))
    await story.say()
    answer = await story.say(1)
    assert (answer.reward, [(one.role, one.reward, one.turns) for one in answer.roles]) == (
        1.5,
        [("a", 1.0, (1,)), ("b", 0.5, ())],
    )


@pytest.mark.parametrize("reward", [np.float64(0.5), np.float32(0.5), 10**20, True])
async def test_any_finite_number_is_a_reward(tmp_path, reward):
    story = Story(make_host(returning(End(reward)), tmp_path))
    await story.say()
    answer = await story.say(1)
    assert (answer.reward, type(answer.reward)) == (float(reward), float)


async def test_a_turn_over_which_its_process_crashes_each_time_is_given_up(tmp_path):
    class Crashing(Diary):
        def step(self, action):
            raise asyncio.CancelledError  # as far as the host can tell its process is gone

    story = Story(make_host(Crashing, tmp_path))
    await story.say()
    story.append([1, END], 3)
    for _ in range(3):
        story.host = make_host(Crashing, tmp_path)
        with pytest.raises(asyncio.CancelledError):
            await story.ask()
    story.host = make_host(Crashing, tmp_path)
    answer = await story.ask()
    assert (answer.failure, answer.detail) == (
        DropReason.ENVIRONMENT_LOST,
        "its process crashed 3 times over this turn",
    )


async def test_one_that_is_forgotten_while_it_works_is_closed_when_it_has_done(tmp_path):
    closed = asyncio.Event()
    go = asyncio.Event()

    class Closing:
        async def reset(self, problem):
            await go.wait()
            return Observation("a")

        async def step(self, action):
            return End()

        async def close(self):
            closed.set()

    story = Story(make_host(Closing, tmp_path))
    asked = asyncio.create_task(story.ask())
    await asyncio.sleep(0)
    story.host.forget(["g0.0"])
    assert not closed.is_set()
    go.set()
    await asked
    await asyncio.wait_for(closed.wait(), 5)


async def test_those_at_work_make_no_room(tmp_path):
    go = asyncio.Event()

    class Held(Diary):
        async def reset(self, problem):
            self.said = ""
            if problem.answer == "1":
                await go.wait()
            return Observation("a")

    host = make_host(Held, tmp_path, most_kept=1)
    slow = asyncio.create_task(Story(host, turns=1, name="g0.0").ask())
    await asyncio.sleep(0)
    quick = Story(host, turns=2, name="g1.0")
    assert (await quick.say()).ids is not None
    assert (await quick.say(1)).ids is not None
    go.set()
    assert (await slow).ids is not None


async def test_reset_may_not_end(tmp_path):
    answer = await Story(make_host(returning(End(), first=End(1.0)), tmp_path)).say()
    assert answer.failure is DropReason.ENVIRONMENT_FAILED
    assert "reset returned End" in answer.detail


async def test_what_takes_too_long_is_dropped_and_enough_of_it_ends_the_process(tmp_path):
    release = asyncio.Event()

    class Slow:
        def reset(self, problem):
            return Observation()

        def step(self, action):
            while not release.is_set():
                time.sleep(0.01)
            return End()

    host = make_host(Slow, tmp_path, timeout_s=0.3, at_once=2)
    story = Story(host)
    await story.say()
    answer = await story.say(1)
    assert answer.failure is DropReason.ENVIRONMENT_TIMEOUT
    assert "environment.timeout_s=0.3" in answer.detail
    with pytest.raises(Exception, match="calls have not returned within"):
        await host._calls.watch(5.0)
    release.set()


async def test_one_that_is_async_holds_nobody_up(tmp_path):
    class Patient:
        async def reset(self, problem):
            return Observation()

        async def step(self, action):
            await asyncio.sleep(0.2)
            return End(1.0)

    host = make_host(Patient, tmp_path)
    stories = [Story(host, name=f"g{number}.0") for number in range(20)]
    for story in stories:
        await story.say()
    began = time.monotonic()
    answers = await asyncio.gather(*(story.say(1) for story in stories))
    assert all(answer.ends for answer in answers)
    assert time.monotonic() - began < 2.0, "twenty side by side, not one after the other"
