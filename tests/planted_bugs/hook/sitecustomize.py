"""Plants one bug of the museum into every process of a run, as soon as its module is imported.

Python imports a module of this name at its start, from the folders of PYTHONPATH. The museum alone
puts this folder there, and names the bug in GRPO_MUSEUM; nothing of it is installed. The file that
GRPO_MUSEUM_REPORT names gets a line for each module that was changed, or could not be.
"""

import atexit
import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path


class Planter:
    """Finds the modules that a bug changes, and changes each once it is loaded."""

    def __init__(self, bugs, name):
        self._bugs, self._name = bugs, name

    def find_spec(self, name, path=None, target=None):
        """Return the spec of a module to change; None leaves the module to others."""
        changes = name in self._bugs.BUGS[self._name]
        spec = PathFinder.find_spec(name, path, target) if changes else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_plant(module):
            load(module)
            try:
                self._bugs.plant(self._name, module)
            except BaseException as error:
                _fail(f"{type(error).__name__}: {error}")
                raise
            _report(f"planted {name}")

        spec.loader.exec_module = load_and_plant
        return spec


def _report(line):
    if path := os.environ.get("GRPO_MUSEUM_REPORT"):
        with open(path, "a") as file:
            file.write(f"{line}\n")


def _fail(problem):
    """Say it, and let the process end with a code that says so even if the error is swallowed."""
    _report(problem)
    sys.stderr.write(f"{problem}\n")
    atexit.register(_end)


def _end():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _plant(name):
    # Loaded by its path: the package `museum` may not be importable in every process.
    path = Path(__file__).resolve().parents[1] / "bugs.py"
    spec = importlib.util.spec_from_file_location("museum_bugs", path)
    assert spec is not None and spec.loader is not None
    bugs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bugs)
    if name not in bugs.BUGS:
        raise bugs.PlantingError(f"museum: bug {name} is not planted: there is none of this name")
    sys.meta_path.insert(0, Planter(bugs, name))


if os.environ.get("GRPO_MUSEUM"):
    try:
        _plant(os.environ["GRPO_MUSEUM"])
    except BaseException as error:
        _fail(f"{type(error).__name__}: {error}")
        _end()  # Python would go on without this module
