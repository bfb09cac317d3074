"""`laminar scale`: another number of replicas for a run that goes on, which its controller is asked for."""

import time
from pathlib import Path
from typing import Annotated

import typer
import yaml

from laminar_py.cli.lines import say
from laminar_py.config.section import ConfigError

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
    from laminar_py.cluster.errors import RunFailedError
    from laminar_py.config.loading import load_config
    from laminar_py.config.scaling import scaled
    from laminar_py.ledger.run_folder import run_at
    from laminar_py.ledger.scaling import ScaleRequests, fleet_on_record

    replicas, urls = _wanted(fleet)
    folder = run_at(run)
    scaled(load_config(folder.config, fleet_on_record(folder, [])), replicas=replicas, urls=urls)
    given = " ".join(f"rollout.{'engine.' if one.startswith('urls') else ''}{one}" for one in fleet)
    gone = f"run={run}: no controller runs it; go on with it by `laminar train CONFIG --resume {given}`"
    if not folder.is_led:
        raise ConfigError(gone)
    requests = ScaleRequests(run)
    request = requests.ask(replicas=replicas, urls=urls)
    began = looked = time.monotonic()
    try:
        while (answer := requests.fetch(request)) is None:
            time.sleep(LOOK_S)
            now = time.monotonic()
            if now - looked > LED_S:
                looked = now
                if not folder.is_led and requests.withdraw(request):
                    raise ConfigError(gone)
            if now - began > PATIENCE_S:
                raise RunFailedError(f"{run}: its controller has not answered in {PATIENCE_S:g} s; see its log")
    finally:
        requests.withdraw(request)
    if not answer.done:
        raise ConfigError(answer.line)
    say(f"{run}: {answer.line}")


def _wanted(fleet: list[str]) -> tuple[int | None, tuple[str, ...] | None]:
    """Number of replicas and servers that are asked for. Raises `ConfigError`."""
    given: dict[str, object] = {}
    for one in fleet:
        key, equals, value = one.partition("=")
        if key not in ("replicas", "urls") or not equals:
            raise ConfigError(f"{one}: a fleet is replicas=N or urls=[...]; write for example replicas=6")
        given[key] = yaml.safe_load(value)
    replicas, urls = given.get("replicas"), given.get("urls")
    if (
        isinstance(replicas, bool)
        or not isinstance(replicas, int | None)
        or ("replicas" in given and replicas is None)
    ):
        raise ConfigError(f"replicas={replicas}: no whole number; write for example replicas=6")
    if isinstance(urls, str):
        urls = [url.strip() for url in urls.split(",")]
    if "urls" in given and not (isinstance(urls, list) and all(isinstance(url, str) for url in urls)):
        raise ConfigError(f"urls={urls}: no list of addresses; write urls=[http://127.0.0.1:30000]")
    return replicas, tuple(urls) if isinstance(urls, list) else None
