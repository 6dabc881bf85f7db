"""Plants one bug of the museum into every process of a run, as soon as its module is imported.

Python imports a module of this name at its start, from the folders of PYTHONPATH. The museum alone
puts this folder there, and names the bug in GRPO_MUSEUM; nothing of it is installed.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path


class Planter:
    """Finds the modules that a bug changes, and changes each once it is loaded."""

    def __init__(self, patches):
        self._patches = patches

    def find_spec(self, name, path=None, target=None):
        """Return the spec of a module to change; None leaves the module to others."""
        patch = self._patches.get(name)
        spec = PathFinder.find_spec(name, path, target) if patch else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_plant(module):
            load(module)
            patch(module)

        spec.loader.exec_module = load_and_plant
        return spec


def _plant(name):
    # Loaded by its path: the package `museum` may not be importable in every process.
    path = Path(__file__).resolve().parents[1] / "bugs.py"
    spec = importlib.util.spec_from_file_location("museum_bugs", path)
    assert spec is not None and spec.loader is not None
    bugs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bugs)
    sys.meta_path.insert(0, Planter(bugs.BUGS[name]))


if os.environ.get("GRPO_MUSEUM"):
    _plant(os.environ["GRPO_MUSEUM"])
