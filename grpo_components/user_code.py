"""Finds the code that is the user's own: neither installed nor part of this package."""

from __future__ import annotations

import ast
import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from grpo_components._plugin import recipes_folder

PACKAGE = Path(__file__).resolve().parent
"""Folder of this package."""
MAX_MODULES = 500
"""Files of the user's that are looked for."""


def user_modules(recipe: str | None) -> dict[str, Path]:
    """Find the user's files that this process imported, or that such a file imports."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    pending = [Path(file) for file in files if isinstance(file, str) and _is_users(Path(file))]
    roots = list(dict.fromkeys(Path(entry or ".").resolve() for entry in [*sys.path, os.getcwd()]))
    roots = [root for root in roots if not is_installed(root)]
    main = None if recipe is None else Path(recipe).resolve()
    pending += [] if main is None else [main]
    found: dict[str, Path] = {}
    seen: set[Path] = set()
    while pending and len(seen) <= 2 * MAX_MODULES:
        path = pending.pop().resolve()
        if path in seen:
            continue
        seen.add(path)
        pending += _imported(path, roots)
        if path != main:
            above = [root for root in roots if path.is_relative_to(root)]
            root = max(above, key=lambda each: len(each.parts), default=path.parent)
            name = str(path.relative_to(root))
            found[str(path).lstrip("/") if name in found else name] = path
    return found


def _imported(path: Path, roots: list[Path]) -> Iterator[Path]:
    """Yield the user's files that a source file imports anywhere, also inside functions."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return  # an extension module, or code that ran from elsewhere
    for node in ast.walk(tree):
        bases, names = roots, []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            bases = [path.parents[node.level - 1]] if 0 < node.level <= len(path.parents) else roots
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
        for name in filter(None, names):
            yield from _files_of(name, bases)


def _files_of(name: str, roots: list[Path]) -> Iterator[Path]:
    """Yield the files of a module and of the packages around it, without importing them."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        for root in roots:
            stem = root.joinpath(*parts[:length])
            for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
                if path.is_file() and _is_users(path):
                    yield path.resolve()


def _is_users(path: Path) -> bool:
    """Whether a file is code of the user: not installed, and not of this package or its recipes."""
    if path.suffix not in (".py", ".so"):
        return False
    real = path.resolve() if path.is_symlink() else path.absolute()
    return _is_users_folder(real.parent) and path.is_file()


@functools.cache  # thousands of modules are imported, from a few hundred folders
def _is_users_folder(folder: Path) -> bool:
    folder = folder.resolve()
    ours = (PACKAGE, recipes_folder().resolve())
    return not is_installed(folder) and not any(map(folder.is_relative_to, ours))


def is_installed(path: Path) -> bool:
    """Whether a path lies among the installed packages, or in Python's own folders."""
    path = path.resolve()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    own = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    return any(path.is_relative_to(folder) for folder in own)
