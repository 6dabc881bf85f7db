"""Hides vLLM from each Python process that has this folder first on its PYTHONPATH."""

from importlib.machinery import PathFinder

_find_spec = PathFinder.find_spec


def _found(name, *more):
    return None if name.partition(".")[0] == "vllm" else _find_spec(name, *more)


PathFinder.find_spec = staticmethod(_found)
