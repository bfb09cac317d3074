"""The command line as a whole, and how it ends: all work is done elsewhere.

Exit codes: 0 done; 1 a law is broken, the run failed, or the mistake is ours; 2 bad input (one line on standard
error); 130 stopped by Ctrl-C with a checkpoint to go on from.
"""

import inspect
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

import typer
from rich.markup import escape

from laminar_py.cli.audit import audit
from laminar_py.cli.bench import bench
from laminar_py.cli.calibrate import calibrate
from laminar_py.cli.clean import clean
from laminar_py.cli.dashboard import dashboard
from laminar_py.cli.data import data
from laminar_py.cli.doctor import doctor
from laminar_py.cli.eval import evaluate
from laminar_py.cli.launch import launch
from laminar_py.cli.plan import plan
from laminar_py.cli.relay import relay
from laminar_py.cli.report import report
from laminar_py.cli.reward import rescore, reward
from laminar_py.cli.samples import samples
from laminar_py.cli.scale import scale
from laminar_py.cli.simulate import simulate
from laminar_py.cli.train import export, train
from laminar_py.config.section import ConfigError
from laminar_py.records.visible import visible

app = typer.Typer(
    name="laminar",
    help="Trajectory-level asynchronous RL post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(epilog="Example: laminar train configs/quickstart.yaml seed=1 steps=60")(train)
app.command(epilog="Example: laminar launch experiments/launcher --dry-run")(launch)
app.command(epilog="Example: laminar scale runs/quickstart-1 replicas=4")(scale)
app.command(epilog="Example: laminar simulate configs/emulation/paper_7b.yaml repack.planner=none")(simulate)
app.command(epilog="Example: laminar plan 7B --gpus 8x8xH100 --price 2.5 --write 7b.yaml")(plan)
app.command(epilog="Example: laminar calibrate configs/quickstart.yaml --out profile.yaml")(calibrate)
app.command(epilog="Example: laminar report runs/quickstart-1")(report)
app.command(epilog="Example: laminar dashboard runs/quickstart-1 --port 8400")(dashboard)
app.command(epilog="Example: laminar data configs/quickstart.yaml")(data)
app.command(epilog="Example: laminar samples runs/quickstart-1 --reward 0 --order longest")(samples)
app.add_typer(audit, name="audit")
app.add_typer(reward, name="reward")
app.command(epilog="Example: laminar rescore runs/quickstart-1")(rescore)
app.command(epilog="Example: laminar export runs/quickstart-1 out/quickstart --dtype bf16")(export)
app.command("eval", epilog="Example: laminar eval runs/quickstart-1 eval.sets.heldout.samples=4")(evaluate)
app.command(epilog="Example: laminar doctor experiments/math_long_cot/7b_8gpu.yaml")(doctor)
app.command(epilog="Example: laminar clean --free")(clean)
app.add_typer(bench, name="bench")
app.add_typer(relay, name="relay")


def _set_help(commands: typer.Typer) -> None:
    """Make the help of commands of their docstrings, as these read.

    Typer by itself keeps their line breaks, and takes brackets for markup.
    """
    for command in commands.registered_commands:
        if command.help is None and command.callback is not None and command.callback.__doc__:
            paragraphs = inspect.cleandoc(command.callback.__doc__).split("\n\n")
            command.help = "\n\n".join(escape(" ".join(one.split())) for one in paragraphs)
    for group in commands.registered_groups:
        if group.typer_instance is not None:
            _set_help(group.typer_instance)


_set_help(app)


def main() -> None:
    """Entry point: whatever ends a command becomes one line; exit code 2 for the user's faults, 1 for all else."""
    from laminar_py.cluster.errors import RunFailedError, tell_unexpected

    try:
        app()
    except SystemExit as end:
        if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):  # Typer made a code of it
            _end("stopped", code=130)
        raise
    except ConfigError as error:
        _end(str(error), code=2)
    except RunFailedError as error:
        _end(str(error), code=1)
    except Exception as error:  # noqa: BLE001 - a mistake of ours; a run has written its traceback into its log already
        with tempfile.NamedTemporaryFile("w", prefix="laminar-", suffix=".log", delete=False) as file:
            file.write(traceback.format_exc())
        _end(tell_unexpected(error, Path(file.name)), code=1)


def _end(line: str, *, code: int) -> NoReturn:
    print("laminar:", visible(line, keep="\n"), file=sys.stderr)
    raise SystemExit(code) from None
