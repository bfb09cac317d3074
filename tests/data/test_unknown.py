"""Words that a tokenizer does not have: all of them, or a sample of the rows that is spread over a source."""

from pathlib import Path

from laminar_py.data.demonstrations import Demonstrations, read_demonstrations
from laminar_py.data.survey import unknown_words
from tests.data.builders import read, text_encoder, written


def test_a_sample_is_bounded_and_reaches_the_end_of_a_source(tmp_path: Path) -> None:
    lines = ['{"prompt": "1+1="}'] * 60 + ['{"prompt": "x=z"}'] * 40
    problems, encoder = read(written(tmp_path / "t.jsonl", *lines)), text_encoder()
    whole = unknown_words([problems], None, encoder=encoder)["data.train"]
    assert (whole.number, whole.first, whole.num_seen, whole.rows) == (80, "x", 100, "all its rows")
    some = unknown_words([problems], None, encoder=encoder, most=9)["data.train"]
    assert (some.num_seen, some.rows) == (9, "9 of its 100 rows"), "every 12th"
    assert (some.number, some.place) == (8, f"data.train={tmp_path}/t.jsonl:61")
    assert unknown_words([problems], None, encoder=encoder, most=100)["data.train"] == whole


def test_demonstrations_are_sampled_by_row_too(tmp_path: Path) -> None:
    source = written(tmp_path / "w.jsonl", *['{"prompt": "1", "response": "1x"}'] * 7, field="warm_start.data")
    encoder = text_encoder()
    read_them = Demonstrations(source, read_demonstrations(source, encoder=encoder, max_tokens=None))
    found = unknown_words([], read_them, encoder=encoder, most=3)["warm_start.data"]
    assert (found.number, found.num_seen, found.num_rows) == (3, 3, 7)
