"""Plants one bug of the museum into every process of a run, as soon as its module is imported.

Python imports a module of this name at its start, from the folders of PYTHONPATH. The museum alone
puts this folder there, and names the bug in GRPO_MUSEUM; nothing of it is installed. The file that
GRPO_MUSEUM_REPORT names gets a line if the bug was planted, or could not be.
"""

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path


class Planter:
    """Finds the module that a bug changes, and changes it once it is loaded."""

    def __init__(self, bugs, name):
        self._bugs, self._name = bugs, name

    def find_spec(self, name, path=None, target=None):
        """Return the spec of the module to change; None leaves a module to others."""
        changes = name == self._bugs.BUGS[self._name].module
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
            _report(f"planted {name}")

        spec.loader.exec_module = load_and_plant
        return spec


def _report(line):
    if path := os.environ.get("GRPO_MUSEUM_REPORT"):
        with open(path, "a") as file:
            file.write(f"{line}\n")


def _fail(problem):
    """Say it, and end the process: who imports the module might go on after an error."""
    _report(problem)
    sys.stdout.flush()
    sys.stderr.write(f"{problem}\n")
    sys.stderr.flush()
    os._exit(1)


def _plant(name):
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from planted_bugs import bugs

    if name not in bugs.BUGS:
        raise bugs.PlantingError(f"museum: bug {name} is not planted: there is none of this name")
    sys.meta_path.insert(0, Planter(bugs, name))


if os.environ.get("GRPO_MUSEUM"):
    try:
        _plant(os.environ["GRPO_MUSEUM"])
    except BaseException as error:  # Python would go on without this module
        _fail(f"{type(error).__name__}: {error}")
