"""`python -m grpo_components.audit OUTPUT_DIR` is `grpo audit OUTPUT_DIR`."""

import sys

from grpo_tools.audit.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
