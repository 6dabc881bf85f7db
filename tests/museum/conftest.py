"""Makes the museum importable, which is no installed package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # last: `recipes` must stay torchtune's
