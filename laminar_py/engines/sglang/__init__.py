"""A client of SGLang, and its servers."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.engines.sglang.engine import SGLangEngine as SGLangEngine
    from laminar_py.engines.sglang.server import ServerSpec as ServerSpec
    from laminar_py.engines.sglang.server import SGLangServer as SGLangServer
    from laminar_py.engines.sglang.settings import NO_FLAGS as NO_FLAGS
    from laminar_py.engines.sglang.settings import Flag as Flag
    from laminar_py.engines.sglang.stream import Served as Served
else:
    __getattr__ = public_names(__name__)
