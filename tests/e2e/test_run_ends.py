"""A run that is interrupted ends, says how to go on, and leaves nothing."""

import re
import signal

from lib.whole_runs import RECIPE, finish, wait_for_line


def test_an_interrupted_run_ends_and_leaves_nothing(tune):
    knobs = "eval_dataset.num_rows=4 num_steps=1000 save_every_n_steps=1"
    process, output_dir = tune(*knobs.split(), new_interpreter=True)
    wait_for_line(process)
    (output_dir.parent / "link").symlink_to(output_dir)
    refused = finish(tune("output_dir=link/")[0])  # while the first run goes on
    in_use = f"output_dir: {output_dir} is in use by pid {process.pid} on "
    assert refused[0] == 2 and f"\nconfig error: {in_use}" in refused[1], refused
    process.send_signal(signal.SIGINT)
    returncode, output = finish(process)
    assert returncode == 130, output
    assert not output_dir.with_name("run0-1").exists()
    assert "Traceback" not in output
    assert re.search(r"^interrupted: stopping all roles \.\.\.$", output, re.MULTILINE)
    assert f"report: {output_dir / 'report.html'}" in output
    assert re.search(r"^books +groups +tokens\n(.*\n)+ +0 +0  residual$", output, re.MULTILINE)
    assert f"last checkpoint: {output_dir / 'checkpoints' / 'step_'}" in output
    (command,) = re.findall(rf"tune run {RECIPE} --config tiny_async_grpo .*", output)
    assert command.endswith(f"{knobs} resume_from_checkpoint=true")
    snapshot = {path.name for path in (output_dir / "code" / "attempt_0").iterdir()}
    assert {"environment.json", f"{RECIPE}.py"} <= snapshot
