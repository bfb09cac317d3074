"""`laminar scale`: another number of replicas for a run that goes on, which its controller is asked for."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laminar_py.cli.lines import say
from laminar_py.config.section import ConfigError

if TYPE_CHECKING:
    from laminar_py.ledger.run_folder import RunFolder
    from laminar_py.ledger.scaling import ScaleAnswer, ScaleRequest, ScaleRequests

LOOK_S = 0.2  # between looks for an answer
LED_S = 3.0  # between looks whether the run goes on
PATIENCE_S = 120.0  # a folder on a network shows new files late, and servers are looked at


def scale(
    run: Annotated[Path, typer.Argument(help="Folder of a run that goes on, e.g. runs/mine-1")],
    fleet: Annotated[list[str], typer.Argument(help="replicas=N, or urls=[...]: all servers it is to attach to")],
) -> None:
    """Change the number of replicas of a run that goes on, or the servers that it attaches to.

    New replicas join without a stop; those that leave get nothing new, and what they have moves to others or ends
    there. Where the cluster has no room, replicas wait for a node that Ray adds.
    """
    from laminar_py.config.loading import load_config, scaled
    from laminar_py.ledger.run_folder import run_at
    from laminar_py.ledger.scaling import ScaleRequests, fleet_on_record

    replicas, urls = _wanted(fleet)
    folder = run_at(run)
    if folder.source.is_file():
        raise ConfigError(f"run={run}: is an evaluation, whose replicas stay as they are; name a run of training")
    scaled(load_config(folder.config, fleet_on_record(folder, [])), replicas=replicas, urls=urls)
    given = f"rollout.replicas={replicas if urls is None else len(urls)}"
    given += "" if urls is None else f" 'rollout.engine.urls=[{','.join(urls)}]'"
    gone = f"run={run}: no controller runs it; go on with it by `laminar train CONFIG --resume {given}`"
    if not folder.is_led:
        raise ConfigError(gone)
    requests = ScaleRequests(run)
    request = requests.send(replicas=replicas, urls=urls)
    try:
        answer = _await_answer(requests, request, folder)
    finally:
        requests.withdraw(request)
    if answer is None:
        raise ConfigError(gone)
    if not answer.done:
        raise ConfigError(answer.line)
    say(f"{run}: {answer.line}")


def _await_answer(requests: "ScaleRequests", request: "ScaleRequest", folder: "RunFolder") -> "ScaleAnswer | None":
    """The controller's answer; None where it has ended without one. Raises `RunFailedError` if it gives none."""
    from laminar_py.runtime.cluster.errors import RunFailedError

    began = looked = time.monotonic()
    while (answer := requests.fetch(request)) is None:
        time.sleep(LOOK_S)
        now = time.monotonic()
        if now - looked > LED_S:
            looked = now
            if not folder.is_led:
                return requests.fetch(request)
        if now - began > PATIENCE_S:
            raise RunFailedError(
                f"{folder.path}: its controller has not answered in {PATIENCE_S:g} s; see its log"
            )
    return answer


def _wanted(fleet: list[str]) -> tuple[int | None, tuple[str, ...] | None]:
    """Number of replicas and servers that are asked for. Raises `ConfigError`."""
    replicas: int | None = None
    urls: tuple[str, ...] | None = None
    for one in fleet:
        key, _, value = one.partition("=")
        if key == "replicas":
            if not value.isdecimal():
                raise ConfigError(f"{one}: no whole number; write for example replicas=6")
            replicas = int(value)
        elif key == "urls":
            listed = value.removeprefix("[").removesuffix("]").split(",")
            urls = tuple(url.strip(" '\"") for url in listed if url.strip())
        else:
            raise ConfigError(f"{one}: a fleet is replicas=N or urls=[...]; write for example replicas=6")
    return replicas, urls
