"""A client of SGLang, and its servers."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.engines.sglang.engine import SGLangEngine as SGLangEngine
    from laminar_py.engines.sglang.launch import check_pool as check_pool
    from laminar_py.engines.sglang.launch import pool_server as pool_server
    from laminar_py.engines.sglang.launch import replica_server as replica_server
    from laminar_py.engines.sglang.server import SGLangServer as SGLangServer
    from laminar_py.engines.sglang.stream import Served as Served
else:
    __getattr__ = public_names(__name__)
