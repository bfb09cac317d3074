"""What is saved of a dead part goes on exactly where the record ends."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.ledger.segments.payload import join
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.salvage import RecordedProgress, Salvage, merge, salvage
from laminar_py.ledger.segments.writer import Journal
from laminar_py.records.pieces import RoutedExperts, SamplingMask, pack_experts, pack_mask
from laminar_py.records.spans import Span
from tests.segments.pieces import make_piece


def salvaged(folder, running):
    """What is found of these, by id, and the pieces; and the journals."""
    answer = salvage(folder, "replica-3", {id: RecordedProgress(*known) for id, known in running.items()})
    loaded = PayloadReader(folder).load([one.tokens.at for one in answer.found])
    return {one.trajectory_id: (one, loaded.piece(one.tokens.at)) for one in answer.found}, answer.journals


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path, "replica-3", roll_bytes=200)


def test_it_goes_on_where_the_record_ends_over_all_files(tmp_path, journal):
    for start in range(0, 50, 5):
        journal.write([make_piece("a", start=start, used_s=float(start)), make_piece("b", start=start)])
    found, journals = salvaged(tmp_path, {"a": (1, 20), "b": (1, 0), "c": (1, 0)})
    assert set(found) == {"a", "b"}
    one, piece = found["a"]
    assert piece == make_piece("a", start=20, tokens=30, used_s=45.0)
    assert (one.tokens.start, one.tokens.end, one.spans, one.used_s) == (20, 50, (Span(7, 20, 50),), 45.0)
    assert one.tokens.at.segment.startswith("salvage-replica-3.")
    assert found["b"][1] == make_piece("b", tokens=50)
    assert len(journals) > 1
    assert journals == sorted(tmp_path.glob("*.journal")), "they stay"


@pytest.mark.parametrize("known", [(1, 3), (1, 50), (1, 51), (2, 0), (0, 0)])
def test_what_does_not_go_on_there_or_is_of_another_epoch_is_left_out(tmp_path, journal, known):
    for start in range(0, 50, 5):
        journal.write([make_piece("a", start=start)])
    assert salvaged(tmp_path, {"a": known})[0] == {}


def test_entries_of_an_epoch_before_are_passed_over(tmp_path, journal):
    journal.write([make_piece("a", epoch=1, version=6), make_piece("a", epoch=2, start=0, version=7)])
    journal.write([make_piece("a", epoch=1, start=5, version=6), make_piece("a", epoch=2, start=5, version=7)])
    found, _ = salvaged(tmp_path, {"a": (2, 0)})
    assert found["a"][1] == make_piece("a", epoch=2, tokens=10, version=7)


def test_a_gap_ends_what_is_given_back(tmp_path, journal):
    for start in (0, 5, 15, 20):
        journal.write([make_piece("a", start=start)])
    assert salvaged(tmp_path, {"a": (1, 0)})[0]["a"][1] == make_piece("a", tokens=10)


def test_journals_of_other_parts_are_not_read(tmp_path, journal):
    Journal(tmp_path, "replica-33").write([make_piece("a")])
    Journal(tmp_path, "replica-4").write([make_piece("a")])
    assert salvaged(tmp_path, {"a": (1, 0)}) == ({}, [])


def test_a_journal_that_goes_meanwhile_costs_no_other(tmp_path, journal):
    journal.write([make_piece("a")])
    gone = tmp_path / "replica-3.0.journal"
    gone.symlink_to("nowhere")  # as if deleted once it was listed
    assert set(salvaged(tmp_path, {"a": (1, 0)})[0]) == {"a"}


def test_a_folder_that_is_not_there_has_nothing(tmp_path):
    assert salvage(tmp_path / "none", "replica-3", {"a": RecordedProgress(1, 0)}) == Salvage([], [])


def mask(*rows):
    counts, ids = [len(row) for row in rows], [id for row in rows for id in row]
    return pack_mask(SamplingMask(np.array(counts, np.int32), np.array(ids, np.int32)))


def experts(start, positions):
    data = bytes(range(start, start + positions))
    return pack_experts(RoutedExperts(start=start, layers=1, top_k=1, width=1, data=data))


def test_masks_and_experts_are_joined_with_their_tokens(tmp_path, journal):
    journal.write([make_piece("a", tokens=2, mask=mask([3, 5], [9]), experts=experts(0, 4))])
    journal.write([make_piece("a", start=2, tokens=1, mask=mask([1]), experts=experts(4, 1))])
    journal.write([make_piece("a", start=3, tokens=0, experts=experts(5, 1))])
    ((one, piece),) = salvaged(tmp_path, {"a": (1, 0)})[0].values()
    assert piece.mask == mask([3, 5], [9], [1])
    assert piece.experts == experts(0, 6)
    assert one.tokens.routed == 6
    assert one.tokens.end == 3


@given(
    cuts=st.lists(st.integers(0, 12), max_size=5).map(lambda cuts: [0, *sorted(cuts), 12]),
    masked=st.lists(st.booleans(), min_size=7, max_size=7),
    versions=st.lists(st.integers(6, 8), min_size=7, max_size=7),
)
def test_pieces_that_are_merged_are_the_response_that_they_were(cuts, masked, versions):
    pieces = []
    for (start, end), has_mask, version in zip(pairwise(cuts), masked, versions, strict=False):
        given = {"mask": mask(*[[token] for token in range(start, end)])} if has_mask else {}
        pieces.append(make_piece(start=start, tokens=end - start, version=version, **given))
    apart, together = join(pieces), join([merge(pieces)])
    assert together.ids.tolist() == apart.ids.tolist()
    assert together.logprobs.tolist() == apart.logprobs.tolist()
    assert together.spans == apart.spans
    assert (together.sampling_mask is None) == (apart.sampling_mask is None)
    if apart.sampling_mask is not None:
        assert together.sampling_mask.counts.tolist() == apart.sampling_mask.counts.tolist()
        assert together.sampling_mask.ids.tolist() == apart.sampling_mask.ids.tolist()
