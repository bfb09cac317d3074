"""Checks of files of changes, before any engine."""

import json
import math

import pytest
import torch

from laminar_py.engines.changes import check_changes
from laminar_py.records.engine import RefusedError
from laminar_py.records.weights import AT, TO
from tests.engines.changes import kind_of_mapping, save_changes

TYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def check(path, *, size=8):
    return check_changes([path], 2, served=1, sizes={"w": size})


def save(path, values, *, at=None):
    at = list(range(len(values))) if at is None else at
    tensors = {"w" + AT: torch.tensor(at, dtype=torch.int64), "w" + TO: values}
    return save_changes(tensors, path, base=1, version=2)


@pytest.mark.parametrize("dtype", TYPES)
def test_all_finite_values_of_a_type_are_taken_and_no_others(dtype, tmp_path):
    most = torch.finfo(dtype)
    fine = torch.tensor([most.max, most.min, most.tiny, most.smallest_normal / 2, 0.0, -0.0], dtype=dtype)
    (file,) = check(save(tmp_path / "fine", fine)).files
    (one,) = file.tensors
    assert (one.name, one.num) == ("w", 6)
    assert file.data[one.to : one.to + fine.nbytes].tobytes() == fine.view(torch.uint8).numpy().tobytes()
    assert kind_of_mapping(file.path) == {"s"}, "strict overcommit charges a private one"
    for place, value in enumerate((math.inf, -math.inf, math.nan, math.inf)):
        bad = fine.clone()
        bad[place] = value
        with pytest.raises(RefusedError, match="w has values that are not finite; load the whole version"):
            check(save(tmp_path / f"bad{place}", bad))


def test_a_tensor_without_changes_is_fine(tmp_path):
    assert check(save(tmp_path / "none", torch.zeros(0))).files[0].tensors[0].num == 0


def test_places_within_the_tensor_are_taken_where_the_file_does_not_align_them(tmp_path):
    header = {"__metadata__": {"base": "1", "version": "2"}}
    header |= {"w" + AT: {"dtype": "I64", "shape": [2], "data_offsets": [4, 20]}}
    header |= {"w" + TO: {"dtype": "F32", "shape": [2], "data_offsets": [21, 29]}}
    text = json.dumps(header).encode()
    values = torch.tensor([0.5, 2.0]).numpy().tobytes()
    data = bytes(4) + torch.tensor([0, 7]).numpy().tobytes() + bytes(1) + values
    path = tmp_path / "changes"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert check(path).files[0].tensors[0].num == 2
    with pytest.raises(RefusedError, match="do not ascend within its 7 values"):
        check(path, size=7)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, (200_008).to_bytes(8, "little") + b"[" * 200_000])
def test_what_is_no_file_of_changes_is_refused(content, tmp_path):
    path = tmp_path / "changes"
    path.write_bytes(content)
    with pytest.raises(RefusedError, match="load the whole version"):
        check(path)
    path.unlink()
    with pytest.raises(RefusedError, match="cannot be read"):
        check(path)
