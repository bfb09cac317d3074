"""Requests for another fleet: each has one answer, whoever dies meanwhile."""

from laminar_py.ledger.scaling import ScaleAnswer, ScaleRequests

DONE = ScaleAnswer(True, "replicas 2 -> 6")


def names(run):
    return sorted(path.suffix for path in (run / "scale").iterdir())


def test_a_request_is_taken_once_answered_and_fetched(tmp_path):
    requests = ScaleRequests(tmp_path)
    asked = requests.send(replicas=6, urls=None)
    assert requests.fetch(asked) is None
    assert ScaleRequests(tmp_path).take_requests() == [asked]
    assert requests.take_requests() == []
    requests.answer(asked, DONE)
    assert requests.fetch(asked) == DONE
    assert names(tmp_path) == []


def test_two_requests_are_taken_in_the_order_in_which_they_were_made(tmp_path):
    requests = ScaleRequests(tmp_path)
    asked = [requests.send(replicas=count, urls=None) for count in (6, 3)]
    assert requests.take_requests() == asked


def test_what_was_withdrawn_is_never_done_and_what_was_taken_is_not_withdrawn(tmp_path):
    requests = ScaleRequests(tmp_path)
    first, second = requests.send(replicas=6, urls=None), requests.send(replicas=3, urls=None)
    assert requests.withdraw(first)
    assert requests.take_requests() == [second]
    assert not requests.withdraw(second)


def test_what_a_dead_controller_left_is_answered_and_not_done(tmp_path):
    requests = ScaleRequests(tmp_path)
    first = requests.send(replicas=6, urls=None)
    requests.take_requests()  # and it dies
    second = requests.send(replicas=3, urls=None)
    requests.refuse_all("ask once more")
    assert requests.take_requests() == []
    assert requests.fetch(first) == requests.fetch(second) == ScaleAnswer(False, "ask once more")


def test_an_answer_that_nobody_fetched_is_deleted(tmp_path):
    requests = ScaleRequests(tmp_path)
    requests.answer(requests.send(replicas=6, urls=None), DONE)
    requests.clear()
    assert names(tmp_path) == [".asked"]


def test_a_file_that_is_no_request_holds_nobody_up(tmp_path):
    requests = ScaleRequests(tmp_path)
    asked = requests.send(replicas=6, urls=None)
    (tmp_path / "scale" / "0.asked").write_text("{")
    assert requests.take_requests() == [asked]
    requests.answer(asked, DONE)
    requests.refuse_all("ended")
    assert names(tmp_path) == [".answer"]
