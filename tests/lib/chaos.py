"""Ends or stops roles of a run at chosen moments, from within its driver.

`forked_recipe` writes a copy of the recipe that does so; the plan is in the environment.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

from grpo_components.cluster.role import Role

TUNE = Path(sys.executable).with_name("tune")
RECIPE = "async_grpo_full_finetune_distributed"


@dataclass(frozen=True)
class Fault:
    role: str
    """Name, or pattern of names as of files."""
    method: str
    """Method of which a call is under way when the fault strikes."""
    number: int = 1
    """Which call of that method, from 1."""
    after_step: int = 0
    """If later than call `number`: the first call since this training step began."""
    delay_s: float = 0.0
    """Seconds from the call to the fault."""
    stop: bool = False
    """Whether the process is stopped (SIGSTOP), not killed."""
    awaited: bool = False
    """Whether training steps end only after the role is back: the run cannot end without it."""


def forked_recipe(folder, faults):
    """Write a copy of the recipe with the faults; return its name and environment variables."""
    recipe = folder / "chaotic_grpo.py"
    subprocess.run([TUNE, "cp", RECIPE, str(recipe)], check=True, capture_output=True)
    main = 'if __name__ == "__main__":'
    source = recipe.read_text()
    assert source.count(main) == 1
    recipe.write_text(source.replace(main, f"{main}\n    import chaos\n\n    chaos.install()"))
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return recipe.name, {
        "CHAOS": json.dumps([asdict(fault) for fault in faults]),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }


def install():
    waiting = [Fault(**fault) for fault in json.loads(os.environ["CHAOS"])]
    calls, submit, answer = Counter(), Role.submit, Role.answer
    awaited = {}

    def strike(role, fault):
        if fault.awaited:
            awaited[role] = role.process.pid
        os.kill(role.process.pid, signal.SIGSTOP if fault.stop else signal.SIGKILL)
        sys.stdout.write(f"chaos: {role.name} {json.dumps(asdict(fault))}\n")

    def disturbed_submit(role, method, *args, **kwargs):
        sent = submit(role, method, *args, **kwargs)
        calls[role.name, method] += 1
        for fault in list(waiting):
            if method != fault.method or not fnmatch(role.name, fault.role):
                continue
            begun = calls["trainer_0", "train_step"] >= fault.after_step
            if calls[role.name, method] >= fault.number and begun and role.process.pid:
                waiting.remove(fault)
                asyncio.get_running_loop().call_later(fault.delay_s, strike, role, fault)
                break
        return sent

    async def held_answer(role, reference, what, timeout_s):
        if what == "train_step":
            for struck, pid in list(awaited.items()):
                while struck.process.pid in (0, pid):
                    await asyncio.sleep(0.1)
                await struck.wait_idle()
        return await answer(role, reference, what, timeout_s)

    Role.submit, Role.answer = disturbed_submit, held_answer
