"""The folder of these tests is on the path: `chaos` is imported here and by the runs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
