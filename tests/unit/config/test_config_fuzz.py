"""Whatever a config holds: it is refused in one line before Ray starts, or everything is built."""

import contextlib
import importlib.util
import io
import json
import math
import re
import shutil
import signal
import sys
import warnings
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lib.loss_inputs import RECIPE
from lib.properties import many
from lib.settings_schema import leaves
from omegaconf import OmegaConf
from ray import cloudpickle

from grpo_components.cluster.supervision import exit_code
from grpo_components.config.reading import merge_overrides, read_config_file
from grpo_components.schedules import as_schedule


class ReachedRayError(BaseException):
    """The config was accepted, and every role's arguments are made."""


class NoCluster:
    """Takes the place of Ray: what is to be sent to a role must be fit to be sent."""

    def __init__(self, *_):
        self.ray = self

    def start(self):
        pass

    def note(self, line):
        assert line.startswith("warning: ")

    def reserve(self, needs, timeout_s):
        cloudpickle.dumps(needs)

    def spawn(self, name, role_class, **kwargs):
        cloudpickle.dumps(kwargs)
        return SimpleNamespace(name=name)

    async def ready(self, timeout_s):
        raise ReachedRayError

    def stop(self):
        pass


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(scope="module")
def recipe(tiny_policy, tmp_path_factory):
    """The recipe's entry over the tiny policy with few prompts; called with overrides."""
    folder = tmp_path_factory.mktemp("fuzz")
    spec = importlib.util.spec_from_file_location("recipe_under_test", RECIPE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    module.build_cluster = NoCluster
    patched = pytest.MonkeyPatch()
    # It depends on no value of the config, and looks at the 6,000 modules of this process.
    patched.setattr("grpo_components.config.open_run.save_code", lambda *_: None)
    # Its process takes longer than all else, and no number of the config reaches the rewards.
    untried = SimpleNamespace(finish=lambda: ([], []), check_rows=lambda *_: [], close=lambda: None)
    patched.setattr("grpo_components.config.trial.RewardTrial", lambda *_: untried)
    values = OmegaConf.to_container(read_config_file("tiny_async_grpo", ()))
    values |= {"base_model_path": str(tiny_policy), "output_dir": str(folder / "run")}
    values["dataset"]["num_rows"] = values["eval_dataset"]["num_rows"] = 3
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(values))

    def run(*overrides):
        """The refusal; "" where the config was accepted."""
        out, err = io.StringIO(), io.StringIO()
        before = {number: signal.getsignal(number) for number in ENDING}
        argv, sys.argv = sys.argv, ["recipe", "--config", str(file), *overrides]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = exit_code(module.recipe_main)
        except ReachedRayError:
            return ""
        finally:
            sys.argv = argv
            for number, handler in before.items():
                signal.signal(number, handler)
            shutil.rmtree(folder / "run", ignore_errors=True)
        refusal = err.getvalue()
        if code == 0:  # a dry run ends where another would reach Ray
            assert out.getvalue().startswith("dry run") and not refusal
            return ""
        assert code == 2, refusal
        assert len(refusal.rstrip("\n")) <= 300, refusal
        assert re.fullmatch(r"config error: [^\n]+\n", refusal), refusal
        return refusal

    run.values = values
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield run
    patched.undo()


RULES: dict[str, list] = {}
"""Key -> the schemas of what it may hold."""
for key, schema in leaves():
    if schema not in RULES.setdefault(key, []):
        RULES[key].append(schema)


SIZES = {"num_generators": 3, "num_trainers": 4, "num_references": 2, "rollouts_in_flight": 9}
SIZES |= {"push_every_n_steps": 3, "pull_every_m_rollouts": 9, "max_staleness": 4, "num_steps": 9}
SIZES |= {"groups_per_step": 9, "group_size": 9, "ppo_epochs": 3, "updates_per_batch": 4}
SIZES |= {"tensor_parallel_dim": 4, "data_parallel_replicate_dim": 4}


def within(schemas, key):
    """Values that a key allows, of a size that a machine has."""
    rule, name = schemas[0], key.rpartition(".")[2]
    if "enum" in rule:
        return st.sampled_from(rule["enum"])
    if rule["type"] == "boolean":
        return st.booleans()
    low = rule.get("minimum", rule.get("exclusiveMinimum"))
    if rule["type"] == "integer":
        return st.integers(low, max(low, min(rule["maximum"], SIZES.get(name, 2000))))
    low, high = -2.0 if low is None else max(low, -2.0), min(rule["maximum"], 2.0)
    number = st.floats(low, high, exclude_min="exclusiveMinimum" in rule)
    if f"{key}.schedule" not in RULES:
        return number
    shape = {"schedule": st.sampled_from(["linear", "cosine"]), "start": number, "end": number}
    shape |= {"num_steps": st.integers(1, 9), "warmup_steps": st.integers(0, 3)}
    return number | st.fixed_dictionaries(shape)


NUMBERS = {
    key: schemas
    for key, schemas in RULES.items()
    if ("enum" in schemas[0] or schemas[0].get("type") in ("integer", "number", "boolean"))
    and not any(schema.get("type") == "string" for schema in schemas[1:])
    and f"{key.rpartition('.')[0]}.schedule" not in RULES
    and not key.startswith("model.")
    and key != "device"
}


@st.composite
def in_range(draw):
    """A few keys with values that their rules allow, however they fit together."""
    keys = draw(st.lists(st.sampled_from(list(NUMBERS)), min_size=1, max_size=6, unique=True))
    return {key: draw(within(NUMBERS[key], key)) for key in keys}


@settings(
    max_examples=many(200),
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(in_range())
def test_values_in_their_ranges_are_refused_together_or_everything_is_built(recipe, changes):
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    if recipe(*overrides):
        return
    values = merge_overrides(recipe.values, overrides)
    for section, name in (("optimizer", "lr"), ("generator", "temperature"), ("loss", "kl_coeff")):
        schedule = as_schedule(name, values[section][name])
        assert all(math.isfinite(schedule(step)) for step in range(12))


def test_this_fuzz_knows_what_is_accepted(recipe):
    """Or all of the above would pass on a config that is refused for another reason."""
    assert recipe() == ""
    assert "group_size" in recipe("group_size=1")
