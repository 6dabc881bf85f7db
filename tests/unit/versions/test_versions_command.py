"""`python -m grpo_components.versions` says in one line why it can do nothing."""

import pytest

from grpo_components.versions.__main__ import main


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (None, "{folder} is no output_dir of a run: "),
        ("base_model_path: /base\n", "no versions in {folder}/policy_versions\n"),
        ("lora: {rank: x}\n", "{folder}/config.yaml: "),
    ],
)
def test_a_folder_without_versions_is_refused_in_one_line(tmp_path, capsys, config, problem):
    if config is not None:
        (tmp_path / "config.yaml").write_text(config)
    assert main([str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith(problem.format(folder=tmp_path))
    assert output.err.count("\n") == 1


def test_no_library_speaks_before_the_answer(tmp_path, interpreter):
    outcome = interpreter("-m", "grpo_components.versions", tmp_path)
    assert outcome.stderr.startswith(f"{tmp_path} is no output_dir of a run")
