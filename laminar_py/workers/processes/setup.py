"""What the processes of a run do first. Called by their actors.

An actor is a thin shell around a part: it decodes a request, wires the part and passes bytes through. All that
crosses is the bytes of a typed record or a scalar. A part that failed raises its own error at the next call, and
its keeper decides what then. Heavy libraries are imported by `start`, since the controller imports the actors.
"""

import logging
from pathlib import Path


def log_to(run_dir: str, part: str) -> None:
    """Have the process log into `<run>/logs/<part>.log`."""
    logging.basicConfig(
        filename=Path(run_dir) / "logs" / f"{part}.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        force=True,
    )


def compute_on_one_core() -> None:
    """Keep torch from starting threads of its own."""
    import torch

    torch.set_num_threads(1)
