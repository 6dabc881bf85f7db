"""Checks that packages which vLLM imports where they are installed fit the installed PyTorch."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys

import torch

from grpo_components.errors import fail, shown

_TOLERATED = {
    "torchvision": (),
    "torchaudio": (),
    # Without FFmpeg, its import raises RuntimeError, and vLLM goes on without it.
    "torchcodec": ("ImportError", "RuntimeError"),
}
"""Packages that vLLM or transformers import if found, and the errors they go on after."""
_PROBE = """
import importlib, json, sys
def tell(*result):
    print("package", json.dumps(result), flush=True)
for name in sys.argv[1:]:
    tell(name, ["crash"], "the import ends the process")
    try:
        importlib.import_module(name)
    except Exception as error:
        tell(name, [kind.__name__ for kind in type(error).__mro__], str(error))
    else:
        tell(name, [], "")
"""
"""Writes a line before and after each import, of which the last one counts."""


def check_packages(timeout_s: float) -> None:
    """Refuse builds of torchvision, torchaudio and torchcodec that do not load.

    vLLM's requirements name these packages, and pip then installs builds for CUDA beside a PyTorch
    for CPUs. Roles that import vLLM or transformers fail with them after half a minute.

    Args:
        timeout_s: limit of the attempt to import them, in seconds.

    Raises:
        ConfigError: an installed package fails; names each, and the command that removes them.
    """
    specs = {name: importlib.util.find_spec(name) for name in _TOLERATED}
    present = tuple((name, spec.origin) for name, spec in specs.items() if spec is not None)
    if not present:
        return
    broken = _import_errors(present, timeout_s)
    if broken:
        error = shown(next(iter(broken.values())))
        problem = (
            f"{', '.join(broken)} cannot be imported with PyTorch {torch.__version__}: {error}"
        )
        fail("packages", problem, f"builds for it, or none: `pip uninstall -y {' '.join(broken)}`")


@functools.cache
def _import_errors(
    packages: tuple[tuple[str, str | None], ...], timeout_s: float
) -> dict[str, str]:
    """Return the error of each package that breaks vLLM, from imports in a process of their own."""
    names = [name for name, _ in packages]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, *names],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        problem = f"preflight waited {timeout_s:g} s for an import of {', '.join(names)}"
        fail("packages", problem, "a longer timeouts.startup_s, or packages that load sooner")
    told = [line.removeprefix("package ") for line in done.stdout.splitlines()]
    results = [json.loads(line) for line in told if line.startswith('["torch')]
    last = {name: (kinds, error) for name, kinds, error in results}
    return {
        name: error
        for name, (kinds, error) in last.items()
        if kinds and not set(_TOLERATED[name]) & set(kinds)
    }
