"""`laminar scale`: ask the controller of a running run for more or fewer replicas."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laminar_py.cli.main import print_line
from laminar_py.config.section import ConfigError

if TYPE_CHECKING:
    from laminar_py.ledger.run_folder import RunFolder
    from laminar_py.ledger.scaling import ScaleAnswer, ScaleRequest

ANSWER_POLL_S = 0.2
CONTROLLER_POLL_S = 3.0
TIMEOUT_S = 120.0  # a network folder shows new files late, and the controller checks new servers


def scale(
    run: Annotated[Path, typer.Argument(help="Folder of a running run, e.g. runs/mine-1")],
    fleet: Annotated[list[str], typer.Argument(help="replicas=N, or urls=[...] with all servers to attach to")],
) -> None:
    """Change how many replicas a running run has, or the servers that it attaches to.

    New replicas join without a stop. Leaving replicas get no new trajectories; theirs move to other replicas or
    end there. If the cluster has no room, replicas wait for a node that Ray adds.
    """
    from laminar_py.config.loading import load_config, scaled
    from laminar_py.ledger.run_folder import run_at
    from laminar_py.ledger.scaling import fleet_on_record, send_request, withdraw_request

    replicas, urls = _read_fleet(fleet)
    folder = run_at(run)
    if folder.source.is_file():
        raise ConfigError(f"run={run}: an evaluation, whose replicas cannot change; name a run of training")
    scaled(load_config(folder.config, fleet_on_record(folder, [])), replicas=replicas, urls=urls)
    given = f"rollout.replicas={replicas if urls is None else len(urls)}"
    given += "" if urls is None else f" 'rollout.engine.urls=[{','.join(urls)}]'"
    gone = f"run={run}: no controller runs it; resume it by `laminar train CONFIG --resume {given}`"
    if not folder.is_led:
        raise ConfigError(gone)
    request = send_request(run, replicas=replicas, urls=urls)
    if request is None:
        raise ConfigError(f"run={run}: another `laminar scale` waits for its answer; try again after it")
    try:
        answer = _await_answer(request, folder)
    finally:
        withdraw_request(run, request)
    if answer is None:
        raise ConfigError(gone)
    if not answer.done:
        raise ConfigError(answer.line)
    print_line(f"{run}: {answer.line}")


def _await_answer(request: "ScaleRequest", folder: "RunFolder") -> "ScaleAnswer | None":
    """Wait for the controller's answer; None where the controller ended without one.

    Raises `RunFailedError` after `TIMEOUT_S`.
    """
    from laminar_py.ledger.scaling import read_answer
    from laminar_py.runtime.cluster.errors import RunFailedError

    began = looked = time.monotonic()
    while (answer := read_answer(folder.path, request)) is None:
        time.sleep(ANSWER_POLL_S)
        now = time.monotonic()
        if now - looked > CONTROLLER_POLL_S:
            looked = now
            if not folder.is_led:
                return read_answer(folder.path, request)
        if now - began > TIMEOUT_S:
            raise RunFailedError(f"{folder.path}: its controller has not answered in {TIMEOUT_S:g} s; see its log")
    return answer


def _read_fleet(fleet: list[str]) -> tuple[int | None, tuple[str, ...] | None]:
    """Number of replicas and servers from the command line. Raises `ConfigError`."""
    replicas: int | None = None
    urls: tuple[str, ...] | None = None
    for argument in fleet:
        key, _, value = argument.partition("=")
        if key == "replicas":
            if not value.isdecimal():
                raise ConfigError(f"{argument}: not a whole number; write for example replicas=6")
            replicas = int(value)
        elif key == "urls":
            listed = value.removeprefix("[").removesuffix("]").split(",")
            urls = tuple(url.strip(" '\"") for url in listed if url.strip())
        else:
            raise ConfigError(f"{argument}: neither replicas=N nor urls=[...]; write for example replicas=6")
    return replicas, urls
