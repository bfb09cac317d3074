"""Choices among replicas, compared with a look at all of them over random histories."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.config.rollout import Schedule
from laminar_py.control.moves import Moves, Round
from tests.control.fleet import Fleet
from tests.depth import examples

REPLICAS, GROUP, NEWEST = 5, 4, 4
indices, versions = st.integers(0, REPLICAS - 1), st.integers(-1, NEWEST)
names = st.integers(0, 30).map(str)
acts = st.one_of(
    st.tuples(st.just("reported"), indices, versions, st.integers(-2, 2 * GROUP)),
    st.tuples(st.just("send"), indices, names, st.none() | st.integers(0, NEWEST)),
    st.tuples(st.just("returned"), indices, names),
    st.tuples(st.sampled_from(("forget", "retire", "leave")), indices),
    st.tuples(st.just("planned"), st.lists(st.booleans(), min_size=REPLICAS, max_size=REPLICAS)),
    st.tuples(st.just("expect") | st.just("arrives"), indices, names),
)


def play(scheduler, history):
    """Have what is in a history happen to views and moves."""
    views, moves = scheduler.views, scheduler.moves
    for act, *what in history:
        match act, what:
            case "reported", (index, version, admissible):
                received = views.by_index[index].sent
                views.reported(index, version=version, admissible=admissible, received=received)
            case "send", (index, name, pin):
                views.send(index, name, pin=pin)
            case "expect", (index, name) if moves.destination(name) is None:
                moves.begin(Round(version=0, open={name: index}, planned={name: 0}))
            case "expect", (index, name):
                moves.expect_more(name, index)
            case "arrives", (index, name):
                moves.arrives(name, index, length=0, prefill=0)
            case _:
                getattr(views, act)(*what)


def scheduler_of(schedule, history, *, newest=NEWEST):
    fleet = Fleet(replicas=REPLICAS, group_size=GROUP, batch=4, schedule=schedule, max_staleness=2)
    fleet.learned(newest)
    play(fleet.scheduler, history)
    return fleet.scheduler


def first(views, key):
    return min(views, key=key, default=None)


def load(view):
    return len(view.in_flight)


def staying(scheduler):
    return [view for view in scheduler.views.by_index.values() if not view.leaving]


def leaving_that_serve(scheduler, version):
    views = scheduler.views.by_index.values()
    return [view for view in views if view.leaving and view.version >= 0 and view.serving == version]


@given(st.sampled_from(Schedule), st.lists(acts, max_size=60), st.integers(0, NEWEST), st.sampled_from((1, GROUP)))
@settings(max_examples=examples(300), deadline=None)
def test_new_trajectories_go_where_a_look_at_all_replicas_would_send_them(schedule, history, newest, size):
    scheduler = scheduler_of(schedule, history, newest=newest)
    views, state = staying(scheduler), scheduler.state
    admission, oldest = state.settings.admission, state.settings.admission.oldest(newest, state.ages)
    groups = admission.share(max(1, sum(view.has_place for view in views)))
    fitting = [
        view
        for view in views
        if view.admissible >= size
        and view.loading is None
        and (oldest is None or view.version >= oldest)
        and (groups is None or load(view) + size <= groups * GROUP)
    ]
    best = first(fitting, lambda view: (load(view), -view.version))
    assert scheduler.router.for_new(size) is best
    serving = [view for view in views if view.version >= max(0, oldest or 0) and view.loading is None]
    one = scheduler.router.for_new(1)
    assert scheduler.router.for_displaced() is (one or first(serving, load))


@given(st.lists(acts, max_size=60), st.integers(0, NEWEST), st.none() | st.integers(0, 4))
@settings(max_examples=examples(300), deadline=None)
def test_pinned_trajectories_go_where_a_look_at_all_replicas_would_send_them(history, version, limit):
    scheduler = scheduler_of(Schedule.ASYNC, history)
    views, expected = staying(scheduler), scheduler.moves.expected
    serving = [view for view in views if view.version >= 0 and view.serving == version]
    idle = [view for view in views if view.idle and view.version < version and not expected(view.index)]
    within = [view for view in serving if limit is None or load(view) < limit]
    last = leaving_that_serve(scheduler, version)
    assert scheduler.router.for_pinned(version, limit=limit) is first(within or idle or last, load)


@given(
    st.lists(acts, max_size=60),
    st.integers(0, NEWEST),
    st.sets(indices),
    st.integers(0, REPLICAS),
    st.sampled_from((0, 64, 150)),
)
@settings(max_examples=examples(300), deadline=None)
def test_members_of_a_pass_go_where_a_look_at_all_replicas_would_send_them(
    history, version, holders, most, num_out
):
    scheduler = scheduler_of(Schedule.ASYNC, history)
    views, expected = staying(scheduler), scheduler.moves.expected
    serving = [view for view in views if view.version >= 0 and view.serving == version]
    idle = [view for view in views if view.idle and view.version < version and not expected(view.index)]
    holding = [view for view in serving if view.index in holders]
    others = [view for view in serving if view.index not in holders] or idle
    last = leaving_that_serve(scheduler, version)
    held = holding or [view for view in last if view.index in holders]
    is_full = num_out >= len(held) * scheduler.state.settings.batch_per_replica
    best = None if is_full else first(held, load)
    others = others or ([] if held else last)
    least = first(serving, load)
    if len([view for view in held if not view.leaving]) < most:
        best = first(others, load) if others else best
    elif least is not None and least.idle and least.index not in holders:
        best = least
    chosen = scheduler.router.for_pass(version, holders=holders, most=most, num_out=num_out)
    assert chosen is best


@given(st.lists(acts, max_size=60), versions)
@settings(max_examples=examples(300), deadline=None)
def test_counts_of_replicas_are_those_of_a_look_at_all(history, version):
    views = scheduler_of(Schedule.ASYNC, history).views
    every = list(views.by_index.values())
    placed = [view for view in every if view.has_place]
    stay = [view for view in placed if not view.leaving]
    assert views.in_flight == sum(map(load, every))
    assert views.num_placed == max(1, len(stay))
    assert views.num_starting() == sum(view.version < 0 and not view.in_flight for view in stay)
    serve = [view for view in placed if not view.leaving or view.version >= 0]
    beyond = [min(view.version, view.serving) > version for view in serve]
    assert views.is_unreachable(version) == (bool(serve) and all(beyond))


@given(
    st.lists(st.tuples(st.sampled_from(("begin", "more", "arrives", "ends", "forget", "done")), names, indices))
)
def test_a_replica_expects_what_was_promised_to_it_and_has_neither_come_nor_been_called_off(history):
    moves, under_way, passes = Moves(), {}, set()
    for act, name, index in history:
        if act == "begin" and name not in under_way:
            moves.begin(Round(version=0, open={name: index}, planned={name: 0}))
            under_way[name] = index
        elif act == "more":
            moves.expect_more(name, index)
            passes.add((name, index))
        elif act in ("arrives", "ends"):
            moves.arrives(name, index, length=1, prefill=1) if act == "arrives" else moves.ends(name)
            under_way.pop(name, None)
        elif act == "forget":
            moves.forget(index)
            passes = {keeper for keeper in passes if keeper[1] != index}
        elif act == "done":
            moves.release_passes(lambda pass_id, gone=name: pass_id != gone)
            passes = {keeper for keeper in passes if keeper[0] != name}
    promised = {*under_way.values(), *(index for _, index in passes)}
    assert [moves.expected(index) for index in range(REPLICAS)] == [i in promised for i in range(REPLICAS)]


class Unscanned(dict):
    """Views that are asked for one by one."""

    def _refuse(self, *_):
        raise AssertionError("looked at all replicas")

    __iter__ = values = items = keys = _refuse


@pytest.mark.parametrize("one_version", [True, False])
async def test_no_report_and_no_dispatch_looks_at_all_replicas(one_version):
    fleet = Fleet(replicas=3, group_size=2, capacity=8, one_version=one_version)
    views = fleet.scheduler.views
    views.by_index = Unscanned(views.by_index)
    for index in fleet.versions:
        await fleet.report(index, admissible=4)
    for index in (0, 1):
        await fleet.grow(index, next(iter(fleet.running[index])), tokens=2)
        await fleet.scheduler.incoming.on_replica_lost(index)
        fleet.running[index].clear()
        fleet.hand_out()
        fleet.scheduler.dispatcher.for_starting(index)
    await fleet.finish_all(2)
    assert fleet.unscored


def test_a_replica_keeps_its_place_when_it_dies_and_its_place_alone():
    scheduler = scheduler_of(Schedule.ASYNC, [("planned", [False, *[True] * 4]), ("send", 0, "a", None)])
    assert scheduler.views.forget(0) == {"a"}
    view = scheduler.views.by_index[0]
    assert view == replace(view, has_place=False, version=-1, admissible=0, sent=0, loading=None)
    assert scheduler.views.num_placed == 4
