"""Real processes of the learner's tests, forked from a server that has imported it, which takes seconds."""

import multiprocessing
from collections.abc import Callable

import torch.multiprocessing

JOIN_S = 240
FORKSERVER = "forkserver"


def prepared() -> None:
    """Have the server import the learner, if it is not running yet."""
    multiprocessing.set_forkserver_preload(["laminar_py.learner.step", "torch._dynamo", "tests.learner.builders"])


def run_ranks(main: Callable[..., None], *arguments: object, world_size: int) -> None:
    """Processes that are each a rank of `main(rank, *arguments)`."""
    prepared()
    context = torch.multiprocessing.start_processes(
        main, arguments, nprocs=world_size, join=False, start_method=FORKSERVER
    )
    # `join` returns when any rank ends, and raises what a rank raised.
    done = any(context.join(timeout=JOIN_S) for _ in range(world_size))
    for process in context.processes:
        process.terminate()
    assert done, "a rank hangs"
