"""A Python of its own: it imports everything anew, which takes most of its time."""

import subprocess
import sys

import pytest


@pytest.fixture
def interpreter():
    """Run Python with some arguments, to its end; returns its code and output."""

    def run(*arguments, **options):
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)

    return run
