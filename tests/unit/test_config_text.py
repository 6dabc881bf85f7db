"""What cannot be read or removed is refused before the config is parsed, in one short line."""

import pytest
from torchtune import config

from grpo_components.cluster.supervision import exit_code
from grpo_components.config_text import MAX_BYTES, check_command


def refusal(check, *args):
    """The message with which something is refused."""
    with pytest.raises(ValueError) as refused:
        check(*args)
    message = str(refused.value)
    assert len(message) <= 285 and "\n" not in message and "; allowed: " in message
    return message


def test_a_file_that_is_none_is_named(tmp_path):
    (tmp_path / "long.yaml").write_bytes(b"# " + b"x" * MAX_BYTES)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    bad = [str(tmp_path), "/dev/zero", "/nowhere.yaml", "x" * 5000, "a\0b"]
    for path in [*bad, str(tmp_path / "long.yaml"), str(tmp_path / "latin.yaml")]:
        assert refusal(check_command, ["--config", path]).startswith("--config: ")


def test_an_override_may_be_so_long_and_no_longer():
    assert refusal(check_command, [f"a={'x' * (MAX_BYTES + 1)}"]).startswith("a: ")
    check_command(["a.b=[1, {c: 2}]", "~c", "d=", "e=None", "x.y.z=${a}"])


@pytest.mark.parametrize("text", ["a: [1,", "a: {b: *x}", "- a"])
def test_a_file_that_is_not_yaml_or_no_mapping_is_one_line(tmp_path, monkeypatch, capsys, text):
    @config.parse
    def recipe_main(cfg):
        raise AssertionError("it was parsed")

    path = tmp_path / "config.yaml"
    path.write_text(text)
    monkeypatch.setattr("sys.argv", ["recipe", "--config", str(path)])
    assert exit_code(recipe_main) == 2
    err = capsys.readouterr().err
    assert err.startswith("config error: ") and err.count("\n") == 1


REWARDS = "a: {b: 1}\nrewards:\n  format: {_component_: x.Y}\n  other: {_component_: x.Z}\n"


@pytest.mark.parametrize(
    ("override", "start", "allowed"),
    [
        ("~rewards.format", "~rewards.format: ", "rewards.format=null"),
        ("~rewards.format._component_", "~rewards.format._component_: ", "rewards.format=null"),
        ("~rewards.formal", "~rewards.formal: ", "a key of the config"),
        ("~nothing", "~nothing: ", "a key of the config"),
        ("~a.b.c", "~a.b.c: ", "a key of the config"),
        ("rewards.formal=null", "rewards.formal: ", "format, other"),
    ],
)
def test_what_cannot_be_removed_is_refused_with_what_to_write(tmp_path, override, start, allowed):
    (tmp_path / "c.yaml").write_text(REWARDS)
    message = refusal(check_command, ["--config", str(tmp_path / "c.yaml"), override])
    assert message.startswith(start) and message.endswith(f"; allowed: {allowed}")


@pytest.mark.parametrize(
    "override", ["~a.b", "~a", "rewards.format=null", "a.new=null", "~rewards"]
)
def test_what_can_be_removed_is_not_refused(tmp_path, override):
    (tmp_path / "c.yaml").write_text(REWARDS + "day: 2001-99-99\n" * (override == "~a.b"))
    check_command(["--config", str(tmp_path / "c.yaml"), override])
