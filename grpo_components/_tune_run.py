"""Makes `tune run` accept any recipe path, and report an unknown recipe or Ctrl-C in one line."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import FrameType, ModuleType

from grpo_components.errors import ConfigError

RECIPE = "async_grpo_full_finetune_distributed"
"""Name of our recipe."""
LOADED = threading.Event()
"""Event that is set when the imports of a recipe have ended."""
_SILENT_S = 4.0
"""Seconds between `still loading` lines while a recipe's imports go on."""


def main(check: Callable[[], None] | None = None) -> None:
    """Announce a run of our recipe, call `check` to fail early, then import and run `tune`."""
    ended: list[int] = []
    atexit.register(_leave, ended)  # called after all functions that are registered later
    if is_run_of_ours(sys.argv):
        _begin()
    gc.disable()  # it takes a fifth of the imports' time
    if check is not None:
        check()
    from torchtune._cli.tune import main as tune

    gc.freeze()  # modules are no garbage: without this, the recipe's imports search them
    gc.enable()
    try:
        tune()
        ended.append(0)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            ended.append(end.code or 0)
        raise


def _leave(ended: Sequence[int]) -> None:
    """Exit at once with the status in `ended`, if any: Python would clear modules for 2 s."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if ended:
        os._exit(ended[0])
    gc.unfreeze()  # else libraries would report modules as leaks


def recipe_argument(argv: Sequence[str]) -> str | None:
    """Return the recipe's name or path in a command `tune run ...`; None for other commands."""
    if Path(*argv[:1]).name != "tune" or list(argv[1:2]) != ["run"]:
        return None
    from torch.distributed.run import get_args_parser  # torchtune parses with it, too

    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            return get_args_parser().parse_args(list(argv[2:])).training_script
        except SystemExit:  # torchtune's parser will say what is wrong
            return None


def complete(registry: ModuleType, recipe: str) -> None:
    """Register a recipe file that torchtune cannot import; refuse a recipe that does not exist.

    torchtune turns a path into a dotted module name: this fails outside the current folder, with a
    leading `./`, in a folder `recipes` (a package of torchtune's), and with a dot in a name.
    """
    recipes = registry.get_all_recipes()
    names = [each.name for each in recipes]
    path = Path(recipe)
    module = os.path.splitext(recipe)[0].replace("/", ".")
    if recipe in names:
        return
    if path.is_file() and path.suffix == ".py":
        if not _is_reachable(recipe):
            given = {"name": recipe, "file_path": str(path.resolve()), "configs": []}
            registry._ALL_RECIPES.append(registry.Recipe(**given, supports_distributed=True))
        return
    if not _is_importable(module):
        files = [file.name for file in sorted(Path().glob("*.py"))]
        near = get_close_matches(recipe.removeprefix("./"), [*names, *files], n=1, cutoff=0.6)
        what = "file" if path.suffix == ".py" or os.sep in recipe else "recipe"
        allowed = f"did you mean {near[0]}?" if near else "a recipe of `tune ls`, or a file"
        error = ConfigError("recipe", f"no {what} {recipe!r:.100}", allowed)
        sys.stderr.write(f"config error: {error}\n")
        sys.exit(2)


def _is_reachable(recipe: str) -> bool:
    """Whether torchtune, which imports a recipe by dotted name, runs this file and no other."""
    parts = os.path.splitext(recipe)[0].split("/")
    if any("." in part or not part for part in parts):
        return False
    found = importlib.util.find_spec(parts[0]) if len(parts) > 1 else None
    return found is None or os.path.abspath(parts[0]) in (found.submodule_search_locations or ())


def _is_importable(module: str) -> bool:
    """Whether torchtune may find a module by its dotted name, in this folder or `sys.path`."""
    stems = [Path(root, *module.split(".")) for root in (*sys.path, os.getcwd())]
    if any(Path(f"{stem}.py").is_file() or (stem / "__main__.py").is_file() for stem in stems):
        return True
    try:  # for a dotted name, `find_spec` would import its parent packages
        return "." not in module and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def is_run_of_ours(argv: Sequence[str]) -> bool:
    """Whether a command is `tune run` with our recipe, or with a file that uses this package."""
    if Path(*argv[:1]).name != "tune" or list(argv[1:2]) != ["run"]:
        return False
    return any(each == RECIPE or _has(Path(each), b"from grpo_components") for each in argv[2:])


def _has(path: Path, text: bytes) -> bool:
    try:
        return path.suffix == ".py" and text in path.read_bytes()
    except (OSError, ValueError):
        return False


def _tell_while_loading() -> None:
    while not LOADED.wait(_SILENT_S):
        sys.stdout.write("  still loading\n")
        sys.stdout.flush()


def _begin() -> None:
    """Tell the user that imports take a while; let Ctrl-C end them at once, without a traceback."""
    sys.stdout.write("loading torch, Ray and torchtune, then checking the config ...\n")
    sys.stdout.flush()
    parses = any(each == RECIPE or _has(Path(each), b"preflight.parse") for each in sys.argv[2:])
    if parses and sys.stdout.isatty():  # for people: scripts get one line
        threading.Thread(target=_tell_while_loading, daemon=True).start()

    def end(number: int, frame: FrameType | None) -> None:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    # An exception would be lost where an import runs a callback. The recipe sets a handler again.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
