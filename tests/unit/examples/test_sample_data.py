"""The sample data sets are reproducible, solvable, and readable by their builders."""

import json
from fractions import Fraction
from itertools import permutations
from operator import add, mul, sub, truediv

import pytest
from lib.rows import Characters

from grpo_components.data.datasets import (
    code_dataset,
    countdown_dataset,
    math_dataset,
    prompt_dataset,
)
from grpo_components.examples.sample_data import main, write_sample_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    write_sample_data(folder, rows=20)
    return folder


def test_the_same_seed_writes_the_same_files(folder, tmp_path):
    for seed in (0, 1):
        files = write_sample_data(tmp_path, rows=20, seed=seed)
        same = [file.read_bytes() == (folder / file.name).read_bytes() for file in files]
        assert same == [seed == 0] * 4


def read(builder, folder, name, **kwargs):
    prompts = builder(Characters(), source=str(folder / name), **kwargs)
    assert len(prompts) == 20
    return [prompts[index] for index in range(20)]


def test_the_builders_read_their_samples(folder):
    answers = {prompt["answer"] for prompt in read(math_dataset, folder, "math.jsonl")}
    assert any(answer.startswith(r"\frac{1}") for answer in answers)
    assert any(answer.isdigit() for answer in answers)
    columns = {"question": "prompt", "answer": "gold"}
    table = read(prompt_dataset, folder, "table.csv", columns=columns)
    assert {"Paris", "Rome"} <= {prompt["answer"] for prompt in table}


def results(numbers):
    """What expressions with all of the numbers are worth."""
    if len(numbers) == 1:
        yield numbers[0]
    for a, b in permutations(range(len(numbers)), 2):
        rest = [number for place, number in enumerate(numbers) if place not in (a, b)]
        for sign in (add, sub, mul, *((truediv,) if numbers[b] else ())):
            yield from results([*rest, sign(numbers[a], numbers[b])])


def test_every_countdown_has_a_solution(folder):
    for prompt in read(countdown_dataset, folder, "countdown.json"):
        task = json.loads(prompt["answer"])
        assert task["target"] in results([*map(Fraction, task["numbers"])])


def test_the_tests_of_every_program_match_its_prompt(folder):
    kinds = set()
    for prompt in read(code_dataset, folder, "code.jsonl"):
        ((kind, cases),) = json.loads(prompt["answer"]).items()
        kinds.add(kind)
        number = next(
            int(word) for word in prompt["prompt_text"].replace(".", "").split() if word.isdigit()
        )
        for case in cases:
            if kind == "stdin_stdout":
                assert int(case["output"]) == int(case["input"]) * number
            else:
                exec(case, {"add": number.__add__})
    assert kinds == {"stdin_stdout", "asserts"}


def test_the_command_prints_what_it_wrote_or_why_it_cannot(tmp_path, capsys):
    assert main([str(tmp_path / "new"), "--rows", "3"]) == 0
    names = ("math.jsonl", "countdown.json", "code.jsonl", "table.csv")
    assert capsys.readouterr().out.split() == [str(tmp_path / "new" / name) for name in names]
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SystemExit, match="2"):
            main([str(path)])
        assert f"error: {path}: " in capsys.readouterr().err.splitlines()[-1]
