"""`verifiers` 0.4, as it is: an agent by its client for training, and a task of ours among its environments."""

import json
import re

import numpy as np
import pytest
import tokenizers

from laminar_py.config.data import ChatConfig
from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.environment.agents.kind import AgentConfig
from laminar_py.environment.writer import open_writer
from laminar_py.records.spans import ANEW
from laminar_py.records.tree import sequences_of
from tests.environment.adapters.packages import ROOT, python_of
from tests.environment.agents.test_agents import Story

pytestmark = pytest.mark.adapters
HERE = ROOT / "tests/environment/adapters"
QWEN = ["<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
BRIDGED = {"name": "qwen3", "thinking_retention": "all"}


class SplitCodec:
    """Tokenizer whose model writes `12` in two tokens, where it would have one."""

    def __init__(self, codec):
        self._codec = codec

    def encode(self, text):
        return np.concatenate([self._codec.encode(part) for part in re.split("(?<=1)(?=2)", text)])


class SumsStory(Story):
    """A model of Qwen's vocabulary whose agent is `play_sums.py`; `renderer` writes its prompts."""

    def __init__(self, folder, *, renderer):
        super().__init__(folder, "")
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.add_special_tokens(QWEN)
        backend.add_tokens(["12"])
        backend.save(str(folder / "tokenizer.json"))
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": self.end}))
        command = [str(python_of("verifiers")), str(HERE / "play_sums.py"), json.dumps(renderer)]
        self.settings = AgentConfig(command=command, timeout_s=120.0)
        self.writer = open_writer(folder, ChatConfig(), self.settings, messages=True)
        self.codec = SplitCodec(load_tokenizer(folder))

    def recorded(self):
        """Branches of the trace that `verifiers` has."""
        return [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]

    def sampled(self):
        """Places of the response that the model wrote."""
        spans = [span for span in self.turn.spans if span.version is not None]
        return np.concatenate([np.arange(span.start, span.end) for span in spans])


async def test_a_rollout_of_verifiers_is_one_sequence_of_the_tokens_that_were_sampled(tmp_path):
    story = SumsStory(tmp_path, renderer=BRIDGED)
    heard = await story.lead(["12", "4"])
    assert (heard[-1].ends, heard[-1].reward) == (True, 1.0), heard
    assert [answer.follows for answer in heard] == [ANEW, None, None], "joined, not begun again"
    (branch,) = story.recorded()
    assert branch["said"] == ["2+2=", "12", "more", "4"]
    assert branch["ids"] == story.turn.response_ids.tolist()
    assert np.flatnonzero(branch["sampled"]).tolist() == story.sampled().tolist()
    values = np.array(branch["logprobs"])[story.sampled()]
    assert values.tolist() == [-1.0, -2.0, -3.0, -1.0, -2.0], "of each turn, as they were sampled"


async def test_prompts_that_are_rendered_anew_begin_a_sequence_where_their_tokens_differ(tmp_path):
    story = SumsStory(tmp_path, renderer={"name": "default"})
    heard = await story.lead(["12", "4"])
    assert heard[-1].reward == 1.0, heard
    assert [answer.follows for answer in heard] == [ANEW, ANEW, None], "12 is one token for the tokenizer"
    assert len(story.recorded()) == len(sequences_of(story.turn.spans)) == 2
    again = SumsStory(tmp_path / "again", renderer={"name": "default"})
    heard = await again.lead(["5", "4"])
    assert [answer.follows for answer in heard] == [ANEW, None, None], "these do not"
