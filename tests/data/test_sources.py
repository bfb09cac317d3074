"""Parquet files and Hugging Face data sets: read as a JSONL of the same rows would be, or refused in one line."""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from laminar_py.config.section import ConfigError
from laminar_py.data.sources import DataSource
from tests.data.builders import read, source, written

ROWS = [
    {"question": f"{n}+{n}=", "reward_model": {"style": "rule", "ground_truth": str(2 * n)}, "level": n}
    for n in (1, 2, 3)
]
COLUMNS = {"prompt": "question", "answer": "reward_model.ground_truth"}


@pytest.fixture(params=["jsonl", "parquet", "saved", "saved splits", "folder"])
def any_source(request, tmp_path: Path) -> DataSource:
    """The same rows, stored in every way."""
    if request.param == "jsonl":
        written(tmp_path / "t.jsonl", *map(json.dumps, ROWS))
        return source(tmp_path / "t.jsonl", columns=COLUMNS)
    if request.param == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "t.parquet")
        return source(tmp_path / "t.parquet", columns=COLUMNS)
    if request.param == "folder":
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "test.parquet")
    else:
        datasets = pytest.importorskip("datasets")
        rows = datasets.Dataset.from_list(ROWS)
        (rows if request.param == "saved" else datasets.DatasetDict({"test": rows})).save_to_disk(tmp_path)
    return source(tmp_path, columns=COLUMNS, split="test")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch) -> None:
    folder = str(tmp_path_factory.mktemp("cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", folder)  # which the library reads at its import
    if "datasets" in sys.modules:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)


def test_every_format_gives_the_same_problems(any_source: DataSource) -> None:
    prompts = read(any_source)
    assert [(prompt.id, prompt.index, prompt.text, prompt.answer) for prompt in prompts] == [
        ("p0", 0, "1+1=", "2"),
        ("p1", 1, "2+2=", "4"),
        ("p2", 2, "3+3=", "6"),
    ]
    assert json.loads(prompts[1].fields_json) == {name: ROWS[1][name] for name in ("reward_model", "level")}


def test_a_column_may_be_renamed_for_the_reward(tmp_path: Path) -> None:
    written(tmp_path / "t.jsonl", '{"prompt": "a", "cases": [1.50], "a.b": 3}')
    (prompt,) = read(source(tmp_path / "t.jsonl", columns={"tests": "cases", "answer": "a.b"}))
    assert (prompt.fields_json, prompt.answer) == (b'{"tests":[1.50]}', "3")


@pytest.mark.parametrize("column", ["nothing", "reward_model.nothing", "level.value"])
def test_a_missing_column_is_named_with_those_there(any_source: DataSource, column: str) -> None:
    settings = any_source.settings.model_copy(update={"columns": {"prompt": column}})
    with pytest.raises(ConfigError) as caught:
        read(DataSource("data.train.1", settings))
    assert str(caught.value) == (
        f"data.train.1={any_source.path}:1: no column {column!r}, which data.train.1.columns names; choose from"
        " question, reward_model, level"
    )


def test_a_fault_in_a_row_of_parquet_has_its_place(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"prompt": "a"}, {"prompt": None}]), tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match=r"^data\.train=.*t\.parquet:2: missing required field `prompt` in .*; "):
        read(source(tmp_path / "t.parquet"))


def faults(tmp_path: Path) -> dict[str, tuple[DataSource, str]]:
    (tmp_path / "t.parquet").write_text("no parquet")
    written(tmp_path / "t.jsonl", '{"prompt": "a"}')
    folder = tmp_path / "folder"
    folder.mkdir()
    written(folder / "train.jsonl", '{"prompt": "a"}')
    return {
        "parquet": (source(tmp_path / "t.parquet"), r"t\.parquet: not readable as Parquet .*; rewrite it"),
        "split": (
            source(tmp_path / "t.jsonl", split="test"),
            r"data\.train\.split: .* is one file.*; leave it",
        ),
        "folder": (
            source(folder, split="test"),
            r"folder: cannot be loaded with split 'test' .*; fix its name",
        ),
        "missing": (source("./no/such"), r"data\.train=no/such: no such file; name a JSONL or Parquet"),
    }


@pytest.mark.parametrize("kind", ["parquet", "split", "folder", "missing"])
def test_what_cannot_be_read_is_one_line(tmp_path: Path, kind: str) -> None:
    at, words = faults(tmp_path)[kind]
    with pytest.raises(ConfigError, match=words) as caught:
        read(at)
    assert "\n" not in str(caught.value)


def test_a_hub_that_is_switched_off_is_one_line(monkeypatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # as the variable of that name does
    words = r"^data\.train=nobody/nothing: cannot be loaded with .*; fix its name, "
    with pytest.raises(ConfigError, match=words) as line:
        read(source("nobody/nothing"))
    assert "\n" not in str(line.value)


@pytest.mark.parametrize("path", ["here/trian.tsv", "here/train", "here/train.jsonl.gz", "train.csv.zst"])
def test_a_mistyped_file_is_no_name_on_the_hub(tmp_path: Path, monkeypatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(ConfigError, match=rf"^data\.train={path}: no such file; name a JSONL or Parquet"):
        read(source(path))


def test_a_revision_is_of_a_data_set_on_the_hub_alone(tmp_path: Path) -> None:
    written(tmp_path / "t.jsonl", '{"prompt": "a"}')
    with pytest.raises(
        ConfigError, match=r"^data\.train\.revision: .*t\.jsonl is one file, which has no revision; leave"
    ):
        read(source(tmp_path / "t.jsonl", revision="main"))
    with pytest.raises(
        ConfigError, match=r"^data\.train\.revision: .* is a folder, which has no revision; leave it out$"
    ):
        read(source(tmp_path, revision="main"))


def test_a_data_set_without_the_package_is_one_line(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs datasets; install laminar-py\[data\], or name a JSONL"):
        read(source("nobody/nothing"))


FORMS = [
    {"prompt": "a", "tests": {"inputs": ["1\n"], "outputs": ["2\n"]}},
    {
        "prompt": "b",
        "tests": {"entry_point": "f", "asserts": "assert f(2) == 4", "cases": [{"a": 1}, {"b": None}]},
    },
]


def test_a_field_that_arrow_fills_with_null_is_absent(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(FORMS), tmp_path / "t.parquet")
    first, second = (json.loads(prompt.fields_json)["tests"] for prompt in read(source(tmp_path / "t.parquet")))
    assert first == FORMS[0]["tests"]
    assert second == FORMS[1]["tests"] | {"cases": [{"a": 1}, {}]}


def test_bytes_in_a_column_are_text_or_refused(tmp_path: Path) -> None:
    table = pa.table({"prompt": pa.array([b"2+2=", "zwei π".encode()], pa.binary()), "answer": ["4", "5"]})
    pq.write_table(table, tmp_path / "t.parquet")
    assert [prompt.text for prompt in read(source(tmp_path / "t.parquet"))] == ["2+2=", "zwei π"]
    rows = [{"prompt": "a", "image": {"bytes": b"PNG"}}, {"prompt": "b", "image": {"bytes": b"\x89PNG"}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "i.parquet")
    with pytest.raises(ConfigError) as caught:
        read(source(tmp_path / "i.parquet"))
    fault = "column 'image' has bytes that are no text; write text in UTF-8, or leave the column out"
    assert str(caught.value) == f"data.train={tmp_path}/i.parquet:2: {fault}"


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "\xef\xbb\xbfb"}\r\n')
    assert [prompt.text for prompt in read(source(tmp_path / "t.jsonl"))] == ["a", "\ufeffb"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('[{"prompt": "a"}]', r"expected `object`, got `array` in .*; write one JSON object a line, in UTF-8$"),
        ('{"prompt": "a",}', r"its JSON is malformed: .*; write one JSON object a line, in UTF-8$"),
        (
            '{"prompt": "a", "answer": [1]}',
            r".* got `array` - at `\$\.answer` in .*; write the field with a value",
        ),
    ],
)
def test_a_row_that_is_no_problem_is_refused_with_what_to_write(tmp_path: Path, line: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.train={tmp_path}/t\.jsonl:1: {fault}"):
        read(written(tmp_path / "t.jsonl", line))
