"""Plants a failure in each process of a run: Python imports this file at its start if its folder is on the path.

`SILENT_PLANT` names a plant of `plants.py`, which is called with each module that it patches, after the import.
Two more are no failures: `unchecked` takes the checks away, and `timed` measures them.
"""

import importlib.abc
import importlib.util
import os
import sys


class _Planting(importlib.abc.MetaPathFinder):
    """Calls the plant with a module that it waits for, right after the import."""

    def __init__(self, plant):
        self._plant = plant
        self._waiting = set(plant.of)

    def find_spec(self, name, path=None, target=None):
        if name not in self._waiting:
            return None
        self._waiting.discard(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run, plant = spec.loader.exec_module, self._plant

        def exec_module(module):
            run(module)
            plant(module)

        spec.loader.exec_module = exec_module
        return spec


if name := os.environ.get("SILENT_PLANT"):
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import further  # noqa: F401 - registers its plants
    import plants

    others = {"unchecked": plants.UNCHECKED, "timed": plants.TIMED}
    sys.meta_path.insert(0, _Planting((plants.ALL | others)[name]))
