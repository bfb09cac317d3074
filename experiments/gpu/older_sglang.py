"""SGLang 0.5.15 as the client reads a server: `python older_sglang.py OPTIONS`, those of `sglang.launch_server`.

The client asks for 0.5.23, which says at the end of a stream which weights made which tokens. 0.5.15 does not, but
loads weights only when no request runs, unless it is paused, and replicas that drain or resume never pause it: all
tokens of a stream have the version that the server names at its end. For `retract`, `in_place`, sampling masks and
adapters it is no server.
"""

import os
import sys
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

CLAIMED = "0.5.23"


def add_spans(manager: type[Any]) -> None:
    """Have the end of every stream name the version of its tokens."""
    wait = manager._wait_one_response

    async def wait_with_spans(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[dict[str, Any]]:
        async for out in wait(self, *args, **kwargs):
            meta = out["meta_info"]
            if meta.get("finish_reason"):
                span = {"version": meta["weight_version"], "start": 0, "end": meta.get("completion_tokens", 0)}
                meta["weight_versions"] = [span] if span["end"] else []
            yield out

    manager._wait_one_response = wait_with_spans


def main() -> None:
    """Serve."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    print(f"SGLang {version('sglang')}, which calls itself {CLAIMED}", flush=True)
    http_server.__version__ = CLAIMED
    add_spans(TokenizerManager)
    try:
        http_server.launch_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
