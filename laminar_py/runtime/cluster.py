"""Ray: starting and ending the local cluster, spawning parts, calling them with a limit.

The only callers of Ray are this module and `runtime.actors`. Calls go to actors as bytes; whatever goes wrong
with a part (its process died, it hangs, it raised) becomes one `PartDiedError`, which the supervisor handles.
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import ray
from ray.exceptions import RayError, RayTaskError

from laminar_py.config import ConfigError
from laminar_py.relay.store import NoRoomError
from laminar_py.runtime.actors import remote

log = logging.getLogger(__name__)


class PartDiedError(Exception):
    """A supervised part is gone or of no use any more; the message says why."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(f"{part}: {reason}")
        self.part = part
        self.reason = reason


class Part:
    """A running actor, e.g. `Part("replica-1", ReplicaActor, concurrency=64, timeout_s=30)`."""

    def __init__(self, name: str, kind: type, *, concurrency: int, timeout_s: float) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._handle = remote(kind, concurrency=concurrency).remote()

    async def call(self, method: str, *arguments: object, timeout_s: float | None = None) -> object:
        """The result of an actor method.

        Raises PartDiedError if there is none in `timeout_s` or it raised; ConfigError where that was bad input.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        reference = getattr(self._handle, method).remote(*arguments)
        try:
            async with asyncio.timeout(limit):
                return await asyncio.wrap_future(reference.future())
        except TimeoutError:
            self.kill()
            raise PartDiedError(self.name, f"no answer to {method} in {limit:g} s") from None
        except RayTaskError as error:
            self.kill()
            cause = _first(error.cause)
            log.error("%s.%s raised", self.name, method, exc_info=cause)
            # bad input that only the part could see: a model it cannot run, a port or memory it does not get
            if isinstance(cause, NoRoomError) or (isinstance(cause, ValueError) and method == "start"):
                raise ConfigError(str(cause)) from None
            raise PartDiedError(self.name, f"{type(cause).__name__}: {cause}") from error
        except RayError as error:
            self.kill()
            raise PartDiedError(self.name, _reason(error)) from error

    def send(self, method: str, *arguments: object) -> None:
        """Call without waiting; a death shows at the next `call`, what the method raised in the log."""
        future = getattr(self._handle, method).remote(*arguments).future()
        future.add_done_callback(lambda done: self._log_failure(method, done.exception()))

    def _log_failure(self, method: str, error: BaseException | None) -> None:
        if isinstance(error, RayTaskError):
            log.error("%s.%s raised", self.name, method, exc_info=error)

    def kill(self) -> None:
        """End its process."""
        with contextlib.suppress(RayError):
            ray.kill(self._handle)


@contextlib.contextmanager
def local_cluster() -> Iterator[None]:
    """A Ray cluster of one node on loopback with token authentication, ended with everything in it."""
    ray.init(
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=128 * 2**20,
        _node_ip_address="127.0.0.1",
    )
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(session, ignore_errors=True)


def _first(error: BaseException) -> BaseException:
    """The first error inside a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _reason(error: RayError) -> str:
    """The first sentence of what Ray says last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].split(". ")[0] if lines else type(error).__name__
