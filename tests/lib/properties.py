"""How many examples a property is tried with: fewer for a quick look, more in the night."""

import os

SCALE = float(os.environ.get("EXAMPLES", "1"))


def many(examples: int) -> int:
    """This many examples, times the environment's EXAMPLES."""
    return max(2, round(examples * SCALE))
