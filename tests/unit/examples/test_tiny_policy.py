"""The tiny policy: its tokenizers agree, its data is right, and so are some of its samples."""

import json
import re

import pytest
import torch
from torchtune.models.qwen2_5 import qwen2_5_tokenizer
from transformers import AutoTokenizer

from grpo_components.data.datasets import gsm8k_dataset
from grpo_components.examples import tiny_policy as module
from grpo_components.examples.tiny_policy import (
    NAMES,
    RECORD_FILE,
    THINGS,
    build_tiny_policy,
    main,
    make_problems,
)

STEPS = 2  # enough for tests that need no trained policy


def build(folder, seed):
    """Build without measuring the success rate, which takes most of a short build."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_success_rate", lambda *_: 0.0)
        build_tiny_policy(folder, seed=seed, steps=STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "policy"
    build(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def torchtune_tokenizer(folder):
    return qwen2_5_tokenizer(
        path=str(folder / "vocab.json"),
        merges_file=str(folder / "merges.txt"),
        special_tokens_path=str(folder / "tokenizer.json"),
    )


def all_problems(seed):
    train, held_out = make_problems(seed)
    return train + held_out


def without_names_and_things(problem):
    return re.sub("|".join(NAMES + THINGS), "_", problem.question)


@pytest.mark.parametrize("seed", range(3))
def test_train_and_held_out_share_no_template_with_the_same_numbers(seed):
    train, held_out = make_problems(seed)
    assert len(train) >= 1000
    assert len(held_out) >= 128
    assert not {*map(without_names_and_things, train)} & {*map(without_names_and_things, held_out)}
    assert len({problem.question for problem in train + held_out}) == len(train + held_out)


def test_every_written_answer_is_right():
    for problem in all_problems(0):
        a, sign, b = problem.sum
        assert problem.result == int(a) + int(f"{sign}{b}") >= 0
        assert re.findall(r"\d", problem.question) == [a, b]
        text = problem.answer(problem.result)
        assert text == f"{problem.sum}={problem.result}\n#### {problem.result}"


def test_both_tokenizers_agree(folder, torchtune_tokenizer):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [problem.prompt for problem in all_problems(0)]
    texts += [problem.answer(problem.result) for problem in all_problems(0)]
    texts += [
        "<|im_start|>user\nHi!<|im_end|>\n",
        " <think>\t na\u00efve \u65e5\u672c 123 </think>",
    ]
    for text in texts:
        ids = torchtune_tokenizer.encode(text, add_bos=True, add_eos=False)
        assert ids == tokenizer.encode(text)
        assert max(ids) < module.ARCHITECTURE["vocab_size"]
        assert torchtune_tokenizer.decode(ids) == text


def test_every_config_has_the_same_end_of_text(folder, torchtune_tokenizer):
    end = AutoTokenizer.from_pretrained(folder).eos_token_id
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == end
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == end
    assert end in torchtune_tokenizer.stop_tokens


def test_a_right_answer_fits_into_a_response(torchtune_tokenizer):
    for problem in all_problems(0):
        ids = torchtune_tokenizer.encode(problem.answer(problem.result), add_bos=False)
        assert len(ids) <= module.MAX_RESPONSE_TOKENS


def test_the_data_files_are_gsm8k_data_sets(folder, torchtune_tokenizer):
    for name, problems in zip(("train", "held_out"), make_problems(0), strict=True):
        rows = gsm8k_dataset(
            torchtune_tokenizer,
            source=str(folder / "data" / f"{name}.jsonl"),
            prompt_template=module.PROMPT_TEMPLATE,
        )
        assert [row["prompt_text"] for row in rows] == [problem.prompt for problem in problems]
        assert [row["answer"] for row in rows] == [str(problem.result) for problem in problems]


def contents(folder):
    """The bytes of every file except the record, which has the build time."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder): path.read_bytes()
        for path in files
        if path.name != module.RECORD_FILE
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

    def build_into(new, seed, steps):
        built.append((seed, steps))
        new.mkdir()
        (new / "model.safetensors").touch()
        return {"held_out_success": 0.4, "held_out_success_greedy": 1.0, "seconds": 1.0}

    monkeypatch.setattr(module, "_build_into", build_into)
    first = build_tiny_policy(folder, seed=0, steps=5)
    assert build_tiny_policy(folder, seed=0, steps=5) == first
    assert built == [(0, 5)]
    build_tiny_policy(folder, seed=0, steps=5, force=True)
    build_tiny_policy(folder, seed=1, steps=5)
    build_tiny_policy(folder, seed=1, steps=6)
    assert built == [(0, 5), (0, 5), (1, 5), (1, 6)]
    assert json.loads((folder / module.RECORD_FILE).read_text())["seed"] == 1
    assert list(tmp_path.iterdir()) == [folder]


def test_a_failed_build_changes_nothing(tmp_path, monkeypatch):
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / module.RECORD_FILE).write_text("{}")
    (folder / "model.safetensors").write_bytes(b"an earlier build")
    before = contents(folder)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_warm_start", interrupted)
    for output_dir in (folder, tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            build_tiny_policy(output_dir, seed=1, steps=1)
    assert contents(folder) == before
    assert list(tmp_path.iterdir()) == [folder]


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
