"""Every component is called once before the start: what breaks its kind's contract is refused."""

import random
import re
import sys

import numpy as np
import pytest
import torch
from lib.config_errors import refusal_of, refused_key
from lib.loss_inputs import recipe_loss
from lib.rows import Characters, write_rows
from lib.tracked import REPOSITORY

from grpo_components.config import environment_trial, preflight
from grpo_components.config.data import build_data
from grpo_components.config.environment_trial import try_environment
from grpo_components.config.objective import build_objective
from grpo_components.config.reading import read_config_file

grpo_loss = recipe_loss()
OBJECTIVE = "grpo_components.objective"
TURNS = "grpo_components.rollout.multi_turn"
TUTOR = "{_component_: grpo_components.rollout.tutor.Tutor}"
REWARDS = """
import os
import sys
import time

class TakesText:
    def __call__(self, text):
        return 1.0

class CannotBeCalled:
    pass

class Reward:
    def __init__(self, result="1.0"):
        self.result = result
        if result == "unbuilt":
            sys.exit(0)

    def __call__(self, *, prompt_text, response_text, answer, finish_reason):
        return eval(self.result)
"""
OWN = """
import random
import sys
import threading

import numpy as np
import torch
from torchrl.envs import EnvBase

from grpo_components.rollout.environments import SingleTurnEnvironment

class Given:
    def __init__(self, result):
        self.result, self.own_calls = result, 0

class Loss(Given):
    def __call__(self, inputs):
        self.own_calls += 1
        random.random(), np.random.rand(), torch.rand(1)
        losses = -inputs.trainer_logprobs * inputs.advantages
        return eval(self.result)

class Raises:
    def __call__(self, inputs):
        return 1 / 0  # line 40

class Compared(Loss):
    needs_reference = True

class Unsent(Loss):
    def __init__(self):
        super().__init__("losses, {}")
        self.lock = threading.Lock()

class Advantages(Given):
    def __call__(self, rewards):
        centred = rewards - rewards.mean(axis=1, keepdims=True)
        return eval(self.result)

class Weights(Given):
    def __call__(self, log_ratios, sequence_ids):
        return eval(self.result)

class Shares(Given):
    def __call__(self, token_counts):
        return eval(self.result)

def wide(*, num_slots, decode, score):
    return SingleTurnEnvironment(num_slots=num_slots + 1, decode=decode, score=score)

class Forgetful(SingleTurnEnvironment):
    def _step(self, tensordict):
        after = super()._step(tensordict)
        for slot in after.unbind(0):
            slot["tokens"] = slot["tokens"][1:]
        return after

class Unasked(EnvBase):
    pass

class Ends(SingleTurnEnvironment):
    def _reset(self, tensordict=None, **_):
        sys.exit(0)

class Some(SingleTurnEnvironment):
    def _step(self, tensordict):
        if self._prompts[0]["prompt_index"] == 0:
            raise RuntimeError("no such level")
        return super()._step(tensordict)

def raises(**given):
    raise RuntimeError("no")

class Rates:
    def __init__(self, optimizer, *, num_training_steps):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.param_groups[0]["lr"] = float("nan")
"""

WORLDS = """
from grpo_components.rollout.multi_turn import Reply

class Right:
    def __call__(self, prompt, seed):
        return lambda text: Reply("again", done=text == prompt["level"])

class Asking:
    def __call__(self, prompt, seed):
        return lambda text: Reply(prompt["colour"])  # raises
"""

AGENTS = """
NUMBER = 3
def run(task): return 1.0
def two(task, other): return 1.0
def none(): return 1.0
class Agent:
    def __init__(self, task): pass
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Enter a folder with a user's own components, which can be imported from there."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_parts.py").write_text(OWN)
    (folder / "own_rewards.py").write_text(REWARDS)
    (folder / "my_worlds.py").write_text(WORLDS)
    (folder / "fine_agent.py").write_text(AGENTS)
    (folder / "broken_agent.py").write_text("import nothing_of_this_name\n")
    (folder / "broken.jinja").write_text("{% for m in messages %}{{ m.content }}")
    (folder / "raising.jinja").write_text("{{ raise_exception('no users') }}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield folder
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)


def checked(*overrides):
    """The tiny config with a few prompts and other components."""
    few = ("dataset.num_rows=8", "eval_dataset.num_rows=2", "num_steps=5")
    return preflight.read_config(read_config_file("tiny_async_grpo", [*few, *overrides]))


@pytest.fixture(scope="module")
def data(tiny_policy, own):
    """Tokenizer and data sets."""
    return build_data(checked("output_dir=/tmp/not-made", f"base_model_path={tiny_policy}"))


@pytest.fixture
def tried(own, data, tiny_policy, tmp_path):
    """Build what the recipe's `setup` builds, and try it; returns the objective."""

    def run(*overrides, **parts):
        folders = (f"output_dir={tmp_path / 'run'}", f"base_model_path={tiny_policy}")
        cfg = checked(*overrides, *folders)
        objective = build_objective(cfg, grpo_loss, *data, **parts)
        assert not (tmp_path / "run").exists()
        return objective

    return run


def component(key, path, **arguments):
    """Overrides that put a component in the place of the tiny config's."""
    drops = {
        "loss": ("clip_low", "clip_high"),
        "optimizer": ("fused", "weight_decay"),
        "rewards.correctness": ("answer_format",),
    }
    return (
        *(f"{key}._component_={path}", *(f"~{key}.{name}" for name in drops.get(key, ()))),
        *(f"{key}.{name}={value}" for name, value in arguments.items()),
    )


RESULTS = {
    "loss": """losses.mean(), {} | losses[:, None], {} | losses.detach(), {} | inputs.entropy, {}
        | losses * float('nan'), {} | losses | losses.long(), {} | sys.exit(0)
        | losses, {'loss/own': losses.mean()} | losses, {'loss/own': 0.5}
        | losses, {'loss/total': losses} | (inputs.trainer_logprobs * 0).sqrt(), {}
        | losses * inputs.advantages / inputs.advantages, {} | losses - inputs.entropy, {}
        | (losses if inputs.step == 0 else losses[1:], {}) | 1 / 0""",
    "advantages": """centred[:, 0] | centred.ravel() | centred.T | centred.tolist() | sys.exit(0)
        | (rewards > 0).astype(int) | None | centred / rewards.std(axis=1, keepdims=True)""",
    "off_policy": """log_ratios.exp().mean() | log_ratios < 1 | -log_ratios.exp()
        | log_ratios * float('nan') | sys.exit(3)""",
    "aggregation": "1 / token_counts.sum() | token_counts * float('nan') | 'TokenMean'",
    "rewards.correctness": """'good' | float('nan') | None | sys.exit(0) | os._exit(0)
        | time.sleep(100) | unbuilt""",
}
PATHS = {"loss": "own_parts.Loss", "advantages": "own_parts.Advantages"}
PATHS |= {"off_policy": "own_parts.Weights", "aggregation": "own_parts.Shares"}
PATHS |= {"rewards.correctness": "own_rewards.Reward"}


def giving(key, result):
    return component(key, PATHS[key], result=f'"{result}"')


@pytest.mark.parametrize("key", RESULTS)
def test_a_component_with_another_output_than_its_kind_is_refused(tried, key):
    for result in map(str.strip, RESULTS[key].split(" | ")):
        error = refusal_of(tried, *giving(key, result), "timeouts.reward_s=1")
        assert error.key == key and error.problem.startswith(PATHS[key]), result


def test_a_loss_that_compares_with_a_reference_needs_one(tried):
    result = '"losses - inputs.reference_logprobs, {}"'
    loss = component("loss", "own_parts.Compared", result=result)
    assert refused_key(tried, *loss, "num_references=0") == "num_references"
    assert tried(*loss, "num_references=1").trained.needs_reference
    tried(*loss, "num_references=0", "eval_only=true")


def test_a_forks_own_advantages_are_tried_in_place_of_the_configs(tried):
    def normalized(rewards):
        return (rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, keepdims=True)

    error = refusal_of(tried, advantages=normalized)  # 0 / 0 in a group of equal rewards
    assert error.key == "advantages" and "normalized returned nan" in error.problem
    assert tried(advantages=np.zeros_like).advantages is np.zeros_like


NONE_OF_THEM = {
    "off_policy": f"builtins.print {OBJECTIVE}.losses.GRPOLoss",
    "loss": f"builtins.print {OBJECTIVE}.aggregation.TokenMean own_parts.Unsent",
    "aggregation": "os.getcwd",
    "advantages": f"{OBJECTIVE}.aggregation.TokenMean",
    "environment": "builtins.id types.SimpleNamespace own_parts.wide own_parts.Forgetful "
    "own_parts.Unasked own_parts.Ends",
    "checkpointer": "own_parts.raises",
    "lr_scheduler": "own_parts.Rates",
    # the last two cannot judge the answers of the data
    "rewards.correctness": "builtins.print own_rewards.TakesText own_rewards.CannotBeCalled "
    "grpo_components.rewards.code_tests.CodeTests "
    "grpo_components.rewards.countdown.CountdownCorrectness",
}


@pytest.mark.parametrize(
    ("key", "path"), [(key, path) for key in NONE_OF_THEM for path in NONE_OF_THEM[key].split()]
)
def test_what_is_no_such_component_is_refused_by_its_key(tried, key, path):
    assert refused_key(tried, *component(key, path)) == key


@pytest.mark.parametrize(
    "override", ["profiler.wait_step=1", "~checkpointer.output_dir", "checkpointer.no_such=1"]
)
def test_a_wrong_argument_of_profiler_or_checkpointer_is_refused(tried, override):
    key = override.strip("~").partition("=")[0]
    assert refused_key(tried, override, "profiler.enabled=true") == key


def test_the_trial_of_profiler_and_checkpointer_makes_no_folder(tried, tmp_path):
    places = (f"checkpointer.output_dir={tmp_path}/a", f"profiler.output_dir={tmp_path}/b")
    for given in ((), places):
        tried(*given, "profiler.enabled=true")
    assert list(tmp_path.iterdir()) == []


def test_a_users_error_shows_its_own_file_and_line_and_its_traceback(tried, own):
    error = refusal_of(tried, *component("loss", "own_parts.Raises"))
    line = next(n for n, text in enumerate(OWN.splitlines(), 1) if "# line 40" in text)
    assert f"({own / 'own_parts.py'}:{line})" in error.problem
    assert "ZeroDivisionError" in error.user_traceback


def test_rows_whose_own_answer_is_not_right_are_among_the_doubts(own, tiny_policy):
    rows = [{"question": "1+1?", "answer": "#### 2"}, {"question": "x?", "answer": "#### 2\n3"}]
    source = write_rows(own / "rows.jsonl", *rows)
    folders = ("output_dir=/tmp/not-made", f"base_model_path={tiny_policy}")
    for key, ignored in (("dataset", "eval_only=true"), ("eval_dataset", "rollout_only=true")):
        for unused in (False, True):
            cfg = checked(f"{key}.source={source}", *folders, *([ignored] if unused else []))
            doubts = build_objective(cfg, grpo_loss, *build_data(cfg)).doubts
            said = [doubt for doubt in doubts if f" 1 of 2 rows of {key}: " in doubt]
            assert len(said) == (not unused), doubts


def test_what_contributing_prints_is_let_through(tried, own):
    page = (REPOSITORY / "CONTRIBUTING.md").read_text()
    for text in re.findall(r"```python\n(# my_\w+\.py\n.*?)```", page, re.DOTALL):
        (own / text.split()[1]).write_text(text)
    weighs = "off_policy._component_=grpo_components.objective.off_policy.GeometricMask"
    tried(*component("loss", "my_losses.TruncatedImportance", max_ratio=2.0), weighs)
    tried(*component("rewards.correctness", "my_rewards.Brevity", max_words=40))
    tried("environment=my_environments.after_the_thought")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        giving("loss", "losses, {'loss/own': losses}"),
        giving("loss", "losses * inputs.entropy.detach(), {}"),
        (*giving("loss", "losses - inputs.entropy, {}"), "loss.entropy_coeff=0.1"),
        giving("advantages", "centred"),
        giving("advantages", "torch.tensor(centred)"),
        giving("off_policy", "log_ratios.exp()"),
        giving("aggregation", "1 / (len(token_counts) * token_counts)"),
        giving("rewards.correctness", "1.0"),
        giving("rewards.correctness", "float(answer) / int(int(answer) % 2 == 0)"),
        component("environment", "own_parts.Some"),
        component("environment", f"{TURNS}.MultiTurnEnvironment", max_turns=3, world=TUTOR),
        ("off_policy._component_=grpo_components.objective.off_policy.MaskedIS",),
        ("loss._component_=grpo_components.objective.losses.DecoupledPPOLoss", "loss.kl_coeff=0.1"),
        ("loss.entropy_coeff=0.1", "reward_shaping.kl_coeff=0.1"),
    ],
)
def test_what_fits_is_let_through_and_not_disturbed(tried, overrides):
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    objective = tried(*overrides)
    assert random.getstate() == states[0]
    np.testing.assert_equal(np.random.get_state(legacy=False), states[1])
    assert torch.equal(torch.get_rng_state(), states[2])
    assert getattr(objective.trained.loss, "own_calls", 0) == 0


def test_what_looks_wrong_is_a_warning_with_the_component_and_nothing_of_ours_does(tried):
    assert tried("loss.kl_coeff=0.1").doubts == ()
    doubtful = component("loss", "planted_bugs.losses.ClippedWeightInGradient")
    (line,) = tried(*doubtful).doubts
    assert line.startswith("warning: loss: ") and "Gradient: a token whose ratio" in line
    assert tried(*doubtful, "max_staleness=0", "pull_every_m_rollouts=1").doubts == ()

    for synchronous in ((), ("max_staleness=0", "pull_every_m_rollouts=1")):
        line = tried(*giving("loss", "-losses, {}"), *synchronous).doubts[0]
        assert line.startswith("warning: loss: ") and line.endswith(": its sign is wrong")


# ---- worlds --------------------------------------------------------------------------------------


@pytest.fixture
def attempt(settings_with, own):
    """Try the environment of several turns with a world, on a row with a column `level`."""
    prompt = {"prompt_index": 0, "prompt_ids": [5, 6], "prompt_text": "?", "answer": "3"}

    def attempt(world):
        environment = {"_component_": f"{TURNS}.MultiTurnEnvironment", "max_turns": 2}
        environment["world"] = {"_component_": f"my_worlds.{world}"}
        cfg = settings_with(environment=environment)
        try_environment(cfg, Characters(), [prompt | {"level": "3"}])

    return attempt


def test_a_world_that_answers_passes(attempt):
    attempt("Right")


def test_a_world_that_would_fail_samples_is_refused_with_its_line(attempt, own):
    error = refusal_of(attempt, "Asking")
    assert error.key == "environment.world" and "my_worlds.Asking" in error.problem
    file = own / "my_worlds.py"
    line = next(n for n, text in enumerate(WORLDS.splitlines(), 1) if "# raises" in text)
    assert f"({file}:{line})" in error.problem
    first = next(s for s in error.user_traceback.splitlines() if s.startswith("  File "))
    assert first.startswith(f'  File "{file}", line {line}, in ')


# ---- agents -------------------------------------------------------------------------------------


@pytest.fixture
def agent(settings_with, tiny_policy, own):
    """Try an environment that runs an agent."""

    def agent(**changes):
        environment = {"_component_": "grpo_components.agents.environment.AgentEnvironment"}
        environment |= {"agent": "fine_agent.run", "chat_template": "plain"}
        given = {key: changes.pop(key) for key in ("reward_model", "rollout_only") & changes.keys()}
        given["base_model_path"] = str(tiny_policy)
        try_environment(settings_with(environment=environment | changes, **given), None, [])

    return agent


def test_a_right_agent_is_taken(agent):
    agent()
    agent(agent={"command": [sys.executable, "x.py"]}, tool_parser="hermes")


NO_AGENTS = [f"fine_agent.{n}" for n in ("nobody", "runs", "two", "none", "Agent", "NUMBER")]
NO_AGENTS += ["fin_agent.run", "broken_agent.run"]
NO_AGENTS += [{"command": ["no-such-program"]}, {"command": ["./fine_agent.py"]}]
NO_TEMPLATES = [None, "broken.jinja", "raising.jinja"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        *(({"agent": wrong}, "environment.agent") for wrong in NO_AGENTS),
        *(({"chat_template": wrong}, "environment.chat_template") for wrong in NO_TEMPLATES),
        ({"tool_parser": "hermez"}, "environment.tool_parser"),
        ({"max_calls": 0}, "environment.max_calls"),
        ({"reward_model": {"path": "/a/model"}}, "reward_model.path"),
        ({"rollout_only": True}, "rollout_only"),
    ],
)
def test_a_wrong_setting_of_an_agent_is_refused_by_its_key(agent, changes, key):
    assert refused_key(agent, **changes) == key


def test_a_tool_parser_needs_vllm_and_an_agent_without_one_does_not(agent, monkeypatch):
    monkeypatch.setattr(environment_trial, "find_spec", lambda name: None)
    agent()
    refusal = refusal_of(agent, tool_parser="hermes")
    assert refusal.key == "environment.tool_parser" and "not installed" in refusal.problem
