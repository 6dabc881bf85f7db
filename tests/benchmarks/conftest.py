"""The benchmarks are scripts: they import each other as neighbours in one folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
