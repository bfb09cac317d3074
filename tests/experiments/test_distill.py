"""The experiment of distillation: seconds to a share of the teacher's accuracy, and who reached it."""

from experiments.distill.run import WAYS, Learned, Teacher, draw, rows

TEACHER = Teacher("t", 0.98)


def learned(*accuracies):
    return Learned("r", [(10.0 * place, accuracy) for place, accuracy in enumerate(accuracies)])


def test_a_time_is_the_first_evaluation_at_the_target_and_counts_where_all_seeds_reach_it():
    found = {
        "reward": [learned(0.1, 0.5, 0.8, 0.95), learned(0.1, 0.5, 0.9, 0.95)],
        "teacher": [learned(0.1, 0.9, 0.8, 0.95), learned(0.1, 0.5, 0.9, 0.95)],
        "both": [learned(0.1, 0.9, 0.9, 0.9), learned(0.1, 0.2, 0.3, 0.4)],
    }
    table = {row.name: row for row in rows(found, TEACHER, 30)}
    assert table["seconds_to_target_reward"].value == 25.0
    assert table["seconds_to_target_teacher"].value == 15.0
    assert table["seconds_to_target_both"].value is None
    assert "1 of 2 seeds reached it" in table["seconds_to_target_both"].conditions
    assert table["teacher_over_reward"].value == (10 / 30 + 20 / 20) / 2
    assert "both_over_reward" not in table
    assert table["accuracy_both"].value == 0.65


def test_curves_are_drawn(tmp_path):
    draw({way: [learned(0.1, 0.5)] for way in WAYS}, TEACHER, tmp_path / "out" / "curves.png")
    assert (tmp_path / "out" / "curves.png").stat().st_size > 0
