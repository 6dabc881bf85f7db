"""The tiny policy: its tokenizers agree, its data is right, and so are some of its samples."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from grpo_components.examples import tiny_policy_model
from grpo_components.examples.tiny_policy import RECORD_FILE, build_tiny_policy, main
from grpo_components.examples.word_problems import NAMES, THINGS, make_problems

EMBEDDING = "model.embed_tokens.weight"
STEPS = 2  # enough for tests that need no trained policy


def build(folder, seed):
    """Build without measuring the success rate, which takes most of a short build."""

    def padded(policy, tokenizer, problems, samples):
        tokenizer(["1", "1 1"], padding=True)
        return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_policy_model, "success_rate", padded)
        build_tiny_policy(folder, seed=seed, steps=STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "policy"
    build(folder, seed=0)
    return folder


def test_the_tokenizers_file_pads_no_text(folder):
    assert json.loads((folder / "tokenizer.json").read_text())["padding"] is None


def without_names_and_things(problem):
    return re.sub("|".join(NAMES + THINGS), "_", problem.question)


@pytest.mark.parametrize("seed", range(3))
def test_train_and_held_out_share_no_template_with_the_same_numbers(seed):
    train, held_out = make_problems(seed)
    assert len(train) >= 1000
    assert len(held_out) >= 128
    assert not {*map(without_names_and_things, train)} & {*map(without_names_and_things, held_out)}
    assert len({problem.question for problem in train + held_out}) == len(train + held_out)


def contents(folder):
    """The bytes of every file except the record, which has the build time."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder): path.read_bytes() for path in files if path.name != RECORD_FILE
    }


def test_the_seed_decides_every_byte(folder, tmp_path):
    torch.manual_seed(99)  # the caller's random state has no effect and is kept
    state = torch.get_rng_state()
    build(tmp_path / "same", seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert contents(tmp_path / "same") == contents(folder)
    assert make_problems(1) != make_problems(0)


def test_a_build_is_kept_unless_forced_or_different(tmp_path, monkeypatch):
    folder = tmp_path / "policy"
    built = []

    def build_into(new, seed, steps, *_):
        built.append((seed, steps))
        new.mkdir()
        (new / "model.safetensors").touch()
        return {"held_out_success": 0.4, "held_out_success_greedy": 1.0, "seconds": 1.0}

    monkeypatch.setattr(tiny_policy_model, "build_into", build_into)
    first = build_tiny_policy(folder, seed=0, steps=5)
    assert build_tiny_policy(folder, seed=0, steps=5) == first
    assert built == [(0, 5)]
    build_tiny_policy(folder, seed=0, steps=5, force=True)
    build_tiny_policy(folder, seed=1, steps=5)
    build_tiny_policy(folder, seed=1, steps=6)
    assert built == [(0, 5), (0, 5), (1, 5), (1, 6)]
    assert json.loads((folder / RECORD_FILE).read_text())["seed"] == 1
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("steps", "greedy", "builds"),
    [(360, [0.87, 0.95], 2), (360, [0.5, 0.6, 0.7], 3), (2, [0.0], 1)],
)
def test_a_policy_that_answers_too_few_problems_is_trained_again(
    steps, greedy, builds, tmp_path, monkeypatch
):
    rates, weights = iter([rate for each in greedy for rate in (0.3, each)]), []

    def warm_start(policy, *_):
        weights.append(policy.lm_head.weight.detach().clone())

    monkeypatch.setattr(tiny_policy_model, "_warm_start", warm_start)
    monkeypatch.setattr(tiny_policy_model, "success_rate", lambda *_: next(rates))
    record = build_tiny_policy(tmp_path / "policy", steps=steps)
    assert (record["held_out_success"], record["held_out_success_greedy"]) == (0.3, greedy[-1])
    assert len({each.sum().item() for each in weights}) == len(weights) == builds
    assert torch.equal(load_file(tmp_path / "policy/model.safetensors")[EMBEDDING], weights[-1])


def test_a_folder_with_other_files_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "thesis.tex").touch()
    assert main(["--output-dir", str(tmp_path), "--force"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--output-dir: ")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_greedy_answers_are_right_and_samples_only_sometimes(tiny_policy):
    record = json.loads((tiny_policy / RECORD_FILE).read_text())
    assert 0.25 < record["held_out_success"] < 0.5
    assert record["held_out_success_greedy"] > 0.9
