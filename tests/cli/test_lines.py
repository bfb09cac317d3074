"""Lines that commands print."""

from laminar_py.cli.lines import say


def test_a_line_comes_out_as_it_is_brackets_included(capsys):
    line = f"laminar train {'long-' * 20}.yaml rollout.engine.urls=[http://a:1] staleness.policies=[drop]"
    say(line)
    assert capsys.readouterr().out == f"{line}\n"
