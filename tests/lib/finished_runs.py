"""The finished runs that tests share, each made once per session."""

import contextlib
import re
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from lib.chaos import Fault, forked_recipe
from lib.classifier import random_classifier
from lib.judge_server import judge_server
from lib.shared_runs import FinishedRun
from lib.tune import starter
from lib.whole_runs import LORA, SYNCHRONOUS, succeed, transformers_policy, wait_for_line


def run_of(tiny_policy, *overrides, faults=(), **options):
    """Return a function that makes a run, in which `faults` kill roles."""

    def make(folder):
        if faults:
            recipe, environment = forked_recipe(folder, faults)
            options.update(recipe=recipe, env=environment)
        with starter(tiny_policy, folder) as tune:
            output, output_dir = succeed(tune, *overrides, **options)
        return FinishedRun(output_dir, output)

    return make


def run_fixture(name, *overrides, policy=lambda tiny_policy: (), **options):
    """Return a fixture of a finished run; `policy`: tiny policy's folder -> overrides with it."""

    @pytest.fixture(name=f"{name}_run")
    def fixture(shared_runs, tiny_policy):
        make = run_of(tiny_policy, *overrides, *policy(tiny_policy), **options)
        with shared_runs.look(name, make) as run:
            yield run

    return fixture


demo_run = run_fixture(
    "demo",
    *("num_steps=100", "generator.backend=null"),
    new_interpreter=True,
    env={"PYTHONPATH": str(Path(__file__).with_name("like_a_mac"))},
)
"""What `make demo` runs, for 100 steps, without vLLM and without what only Linux has."""
split_run = run_fixture("split", *SYNCHRONOUS)
"""A synchronous run whose generators and trainers have processes of their own."""
colocated_run = run_fixture("colocated", *SYNCHRONOUS, "colocate=true")
"""The run of `split_run`, whose trainers and generators take turns."""
_FAULTS = (Fault("generator_0", "load_weights", 2),)
lora_run = run_fixture("lora", *LORA, policy=transformers_policy, faults=_FAULTS)
"""Adapters on a policy of transformers; the generator is killed while it loads an adapter."""
TALKATIVE = """
from grpo_components.rollout.multi_turn import Reply


class Talkative:
    def __call__(self, prompt, seed):
        left = 20 if prompt["prompt_index"] in (6, 7) else 0

        def respond(text):
            nonlocal left
            left -= 1
            return Reply("And? ", done=left < 0, rewards={"odd": len(text) % 2})

        return respond
"""


def full_knobs(folder, tiny_policy, judge_url):
    """Return overrides: all kinds of roles, two generators, and a few long conversations.

    Groups 6 and 7 start after the first step and have 21 turns, all others have one. Steps 2 and 3
    have their groups in the buffer already. The rollouts that start after them are on the same
    generators, and pull. Step 4 must train groups 6 and 7, before they are too old; only then is
    the generator killed that gets the next group, so that no long response begins again.

    Reference and teacher have the base model's weights, one in torchtune's decoder and one in that
    of transformers: they measure the same KL.
    """
    return (
        *("num_steps=8", "groups_per_step=2", "group_size=2", "eval_dataset.num_rows=2"),
        *("rollouts_in_flight=3", "pull_every_m_rollouts=1", "shuffle=false"),
        *("generator.max_response_tokens=400", "generator.temperature=2", "eval_every_n_steps=5"),
        *("num_generators=2", "loss.kl_coeff=0.01", "stale_groups=wait", "log_token_logprobs=true"),
        "reward_model.weight=0.5",
        f"reward_model.path={folder / 'classifier'}",
        "environment._component_=grpo_components.rollout.multi_turn.MultiTurnEnvironment",
        "environment.max_turns=21",
        "environment.world._component_=my_worlds.Talkative",
        *("rollouts_logged_per_step=2", f"teacher.path={tiny_policy}", "teacher.coeff=0.05"),
        "rewards.judge._component_=grpo_components.rewards.judge.LLMJudge",
        *("rewards.judge.weight=0.1", "rewards.judge.model=random", "rewards.judge.wall_s=50"),
        *(f"rewards.judge.base_url={judge_url}", "timeouts.reward_s=60"),
        "rewards.judge.rubric='{{ prompt }} {{ response }}'",
    )


@pytest.fixture
def full_run(shared_runs, tiny_policy):
    """A run of all roles: weights change within responses; a generator and the buffer are killed.

    It pushes deltas; the new generator gets the last whole push and all deltas since.
    """

    def make(folder):
        random_classifier(folder / "classifier", tiny_policy)
        (folder / "my_worlds.py").write_text(TALKATIVE)
        faults = [
            Fault("generator_*", "generate_group", after_step=4, awaited=True),
            Fault("replay_buffer", "add", 9, awaited=True),
        ]
        recipe, environment = forked_recipe(folder, faults)
        with judge_server() as judge, starter(tiny_policy, folder) as tune:
            judge.default = by_length
            knobs = full_knobs(folder, tiny_policy, judge.url)
            process, output_dir = tune(*knobs, "push=delta", recipe=recipe, env=environment)
            shown = wait_for_line(process)
            seen = {"listening": listening(process)}
            rest, _ = process.communicate(timeout=1500)
            assert process.returncode == 0, shown + rest
            assert not re.search("^warning: ", shown + rest, re.MULTILINE), shown + rest
            seen |= {"asked": len(judge.requests), "judge": judge.url}
        return FinishedRun(output_dir, shown + rest, seen)

    with shared_runs.look("full", make) as run:
        yield run


def by_length(request):
    """A judge's answer that differs between responses, as the trial of a reward wants."""
    return f"Score: {len(request['messages'][-1]['content']) % 11}"


def listening(process):
    found = []
    for each in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            sockets = each.net_connections("inet")
            found += [(each.name(), s.laddr.ip) for s in sockets if s.status == "LISTEN"]
    return found


@pytest.fixture
def replayed_run(shared_runs, tiny_policy, full_run):
    """The replay of `full_run`; it pushes whole weights, and saves each step."""

    def make(folder):
        port = urlsplit(full_run.seen["judge"]).port
        with judge_server(port) as judge, starter(tiny_policy, folder) as tune:
            judge.default = by_length
            output, output_dir = succeed(
                tune,
                *full_knobs(full_run.folder.parent, tiny_policy, full_run.seen["judge"]),
                *("save_every_n_steps=1", "keep_last_n=null"),
                f"replay_events={full_run.folder}",
                cwd=full_run.folder.parent,
            )
        return FinishedRun(output_dir, output)

    with shared_runs.look("replayed", make) as run:
        yield run
