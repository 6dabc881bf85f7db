"""Processes of a run: Ray, the roles and their supervision."""

import os

# Ray reads it when it is imported: its paragraph about each dead process says less than our line.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
