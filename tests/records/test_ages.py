"""Ages of versions: learner steps between weights, by hand and against weights that remember their own history."""

from hypothesis import given
from hypothesis import strategies as st

from laminar_py.records.ages import WeightAges


def test_a_version_is_as_old_as_the_steps_since_it_whatever_its_number():
    ages = WeightAges()
    ages.record_version(0)
    for learned in (True, False, True):
        ages.record_step(learned=learned)
    ages.record_version(7)
    ages.record_step(learned=True)
    assert [ages.age_of(version) for version in (0, 7)] == [3, 1], "the step without trajectories changed nothing"
    assert ages.age_of(0, after=1) == 1


def test_weights_of_a_branch_that_was_left_are_as_far_as_the_steps_undone_and_those_since():
    ages = WeightAges()
    for version in range(4):
        ages.record_version(version)
        ages.record_step(learned=True)
    ages.record_rollback(1)
    ages.record_version(4)
    assert [ages.age_of(version) for version in range(5)] == [1, 0, 1, 2, 0]
    ages.record_step(learned=True)
    assert [ages.age_of(version) for version in range(5)] == [2, 1, 2, 3, 1]


def test_admission_goes_down_to_the_oldest_version_within_the_bound():
    ages = WeightAges()
    assert ages.oldest_within(3) is None
    for version in range(6):
        ages.record_version(version)
        ages.record_step(learned=True)
        ages.record_step(learned=True)
    assert [ages.oldest_within(bound) for bound in (1, 2, 5, 99)] == [None, 5, 4, None]


@given(st.lists(st.tuples(st.sampled_from(["step", "step", "empty", "publish", "back"]), st.integers(0, 20))))
def test_ages_are_distances_between_weights(happenings):
    """Weights as the path of updates that made them: two differ by what only one of them has."""
    ages, path, by_step, made, fresh = WeightAges(), (), [()], {}, 0
    for happening, number in happenings:
        if happening in ("step", "empty"):
            path = (*path, fresh) if happening == "step" else path
            fresh += 1
            by_step.append(path)
            ages.record_step(learned=happening == "step")
        elif happening == "publish":
            made[len(made)] = path
            ages.record_version(len(made) - 1)
        else:
            step = number % len(by_step)
            del by_step[step + 1 :]
            path = by_step[-1]
            ages.record_rollback(step)
        for version, weights in made.items():
            assert ages.age_of(version) == len(set(weights) ^ set(path))
