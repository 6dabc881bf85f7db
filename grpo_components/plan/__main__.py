"""`python -m grpo_components.plan --config NAME` is `grpo plan --config NAME`."""

import sys

from grpo_tools.memory_plan.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
