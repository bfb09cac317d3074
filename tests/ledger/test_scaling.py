"""A request for another fleet: one at a time, and each has an answer, also after a crash."""

from laminar_py.ledger.scaling import (
    REQUEST,
    ScaleAnswer,
    answer_request,
    read_answer,
    read_request,
    refuse_request,
    send_request,
    withdraw_request,
)


def test_a_request_is_open_until_its_answer_and_then_another_one_may_follow(tmp_path):
    first = send_request(tmp_path, replicas=6, urls=None)
    assert send_request(tmp_path, replicas=3, urls=None) is None
    assert (read_request(tmp_path), read_answer(tmp_path, first)) == (first, None)
    answer_request(tmp_path, first, ScaleAnswer(True, "replicas 2 -> 6"))
    assert read_request(tmp_path) is None
    assert read_answer(tmp_path, first) == ScaleAnswer(True, "replicas 2 -> 6", first.id)
    second = send_request(tmp_path, replicas=3, urls=None)
    assert (read_request(tmp_path), read_answer(tmp_path, second)) == (second, None)


def test_a_withdrawn_request_is_gone_and_so_is_no_other(tmp_path):
    first = send_request(tmp_path, replicas=6, urls=None)
    withdraw_request(tmp_path, first)
    assert read_request(tmp_path) is None
    second = send_request(tmp_path, replicas=3, urls=None)
    withdraw_request(tmp_path, first)
    assert read_request(tmp_path) == second


def test_a_request_to_a_crashed_controller_is_refused_and_a_damaged_file_deleted(tmp_path):
    request = send_request(tmp_path, replicas=6, urls=None)
    refuse_request(tmp_path, "ask once more")
    assert read_answer(tmp_path, request) == ScaleAnswer(False, "ask once more", request.id)
    (tmp_path / REQUEST).write_text("{")
    assert read_request(tmp_path) is None
    assert not (tmp_path / REQUEST).exists()
    refuse_request(tmp_path, "ended")
