"""Settings of malloc stay for the rest of a process: they are tried in one of their own."""

import subprocess
import sys

PROBE = """
import resource
import numpy as np
from grpo_components.malloc import keep_freed

keep_freed()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(2**24, np.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_freed_buffer_is_used_again_without_new_pages():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100  # 500 without the setting
