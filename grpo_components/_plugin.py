"""Registers our recipe and its configs with torchtune when torchtune's registry is imported."""

import argparse
import filecmp
import importlib
import importlib.util
import logging
import shutil
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

from grpo_components._tune_run import RECIPE, complete, recipe_argument

_REGISTRY = "torchtune._recipe_registry"


def install() -> None:
    """Register the recipe as soon as torchtune's registry is imported; `import torch` calls this.

    This function is an entry point of the group `torch.backends`: it runs in every program that
    imports torch, while torch itself is still being imported. So import nothing heavy here.
    """
    if _REGISTRY in sys.modules:
        _register_or_warn(sys.modules[_REGISTRY])
    else:
        sys.meta_path.insert(0, _RegistryFinder())
    program = Path(*sys.argv[:1])
    modules = ("equivalence", "memory_plan", "plan", "simulate")
    if program.name in ("tune", "grpo", "tiny_policy.py") or program.parent.name in modules:
        # torchtune needs a torchao that is too old for this torch. torchao then leaves out its C++
        # kernels, which we do not use, and warns at every start: these programs hide the warning.
        logging.getLogger("torchao").addFilter(lambda record: "cpp extensions" not in record.msg)


def list_or_copy() -> None:
    """Run `tune ls` or `tune cp` without importing torch, which would take 4 s."""
    if "torchtune" not in sys.modules and (spec := importlib.util.find_spec("torchtune")):
        stub = sys.modules["torchtune"] = ModuleType("torchtune")
        stub.__path__, stub.__file__ = [*(spec.submodule_search_locations or ())], spec.origin
    register(importlib.import_module(_REGISTRY))
    parser = argparse.ArgumentParser(prog="tune")
    subparsers = parser.add_subparsers()
    for module, command in (("ls", "List"), ("cp", "Copy")):
        commands = importlib.import_module(f"torchtune._cli.{module}")
        vars(commands).update(shutil=SimpleNamespace(copy=_copy_new))
        getattr(commands, command).create(subparsers)
    options = parser.parse_args()
    options.func(options)


def _copy_new(source: Path, destination: Path) -> Path | str:
    """Copy like `shutil.copy`, but refuse to overwrite a file that differs: it may have edits."""
    file = destination / source.name if destination.is_dir() else destination
    if file.is_file() and not filecmp.cmp(source, file, shallow=False):
        problem = f"{file} exists and differs; nothing was copied"
        sys.stderr.write(f"error: {problem}; allowed: another name, or remove the file first\n")
        sys.exit(2)
    return shutil.copy(source, destination)


def register(registry: ModuleType) -> None:
    """Add our recipe and its configs to torchtune's registry, unless they are already there."""
    if any(recipe.name == RECIPE for recipe in registry.get_all_recipes()):
        return
    recipe = recipes_folder() / f"{RECIPE}.py"
    registry._ALL_RECIPES.append(
        registry.Recipe(
            name=RECIPE,
            file_path=str(recipe),
            configs=[
                registry.Config(name=name, file_path=str(path))
                for name, path in config_files(recipe.parent / "configs").items()
            ],
            # Ray starts the trainer ranks: torchrun must not.
            supports_distributed=False,
        )
    )


def recipes_folder() -> Path:
    """Return the recipe's folder: in an installed package, or next to the package in a checkout."""
    package = Path(__file__).resolve().parent
    folders = (package / "_recipes", package.parent / "recipes")
    for folder in folders:
        if (folder / f"{RECIPE}.py").is_file():
            return folder
    raise FileNotFoundError(f"{RECIPE}.py is in none of {', '.join(map(str, folders))}")


def config_files(folder: Path) -> dict[str, Path]:
    """Map the sorted names of a folder's configs to files; names like `tiny_...` come first."""
    names = {
        path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.yaml")
    }
    return {
        name: names[name] for name in sorted(names, key=lambda n: (not n.startswith("tiny"), n))
    }


class _RegistryFinder:
    """Import hook that registers our recipe right after torchtune's registry module has run."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)  # needed once; `find_spec` below would call it again
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        run_module = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run_module(module)
            _register_or_warn(module)

        # Patched on this loader object only, so that `inspect` and `reload` work as usual.
        spec.loader.exec_module = run_and_register
        return spec


def _register_or_warn(registry: ModuleType) -> None:
    try:
        register(registry)
        if (recipe := recipe_argument(sys.argv)) is not None:
            complete(registry, recipe)
    # No error here may break `import torch` or `tune` for everybody else.
    except Exception as error:
        warnings.warn(f"async GRPO was not added to `tune`: {error!r}", stacklevel=2)
