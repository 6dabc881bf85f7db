"""What no parser should see is refused first: by key, in one short line, at once."""

import pytest
from omegaconf import OmegaConf
from torchtune import config

from grpo_components.cluster.supervision import exit_code
from grpo_components.config_text import (
    MAX_BYTES,
    MAX_DEPTH,
    check_command,
    check_values,
    check_yaml,
)

NINES = "9" * 5000


def refusal(check, *args):
    """The message with which something is refused."""
    with pytest.raises(ValueError) as refused:
        check(*args)
    message = str(refused.value)
    assert len(message) <= 285 and "\n" not in message and "; allowed: " in message
    return message


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("a: " + "[" * 100_000 + "]" * 100_000, "a.0.0.0"),
        ("a: {x: " + "{x: " * 20_000, "a.x.x.x"),
        ("a:\n  " + "- " * 5000 + "1", "a.0.0.0"),
        ("\n".join(" " * level + "a:" for level in range(600)), "a.a.a"),
        ("a:\n- " + "{x: [" * 1000, "a.0.x.0"),
        ("x" * 900 + ": " + "[" * 1000, "xxxx"),
    ],
)
def test_nesting_is_bounded_before_it_is_parsed(text, start):
    message = refusal(check_yaml, text)
    assert message.startswith(start) and "nested more than" in message


def test_nesting_adds_up_over_aliases():
    steps = [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, MAX_DEPTH)]
    assert refusal(check_yaml, "\n".join(["a0: &a0 [1]", *steps])).startswith(f"a{MAX_DEPTH - 1}")
    check_yaml("\n".join(["a0: &a0 [1]", *steps[:-2]]))


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (f"a: {{b: [1, {NINES}]}}", "a.b.1: a whole number of 5000 digits given"),
        (f"a: 0x{'f' * 5000}", "a: a whole number of 60"),
        (f"a: -{NINES}", "a: a whole number"),
        (f"a: {'9' * 400}", "a: a whole number of 400 digits given"),
        ("a: 1:" + ":".join(["1"] * 500), "a: a whole number"),
        ("a: !!int abc", "a: 'abc' given"),
        ("a: !!timestamp 2001-99-99", "a: '2001-99-99' given"),
        ("a: !!python/name:os.getcwd ''", "a: '' given"),
        ("a: !!python/object/apply:os.getcwd []", "a: the tag "),
        ("a: {b: &x [*x]}", "a.b.0: *x given"),
        ("a: {b: *x}", "a.b: *x given"),
        ("a: {b: '${c:1}'}", "a.b: '${c:1}' given"),
        ("a: {b: ${${${c}}}}", "a"),
        ("? [a]\n: 1", "config: a mapping or list as a key"),
        ("a: {? {b: 1} : 1}", "a: a mapping or list as a key"),
        ("1: 2", "1: 1 given as a key"),
        ("- a", "config: a list given"),
        ("just text", "config: 'just text' given"),
        ("a: [1,", "a.1: not YAML in line 1, column 7"),
        ("a: 1\nb: \x00", "config: not YAML in line 2"),
    ],
)
def test_what_cannot_be_read_names_its_key(text, start):
    assert refusal(check_yaml, text).startswith(start)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "a: 1\nb: {c: [1, {d: 2}], e: 1e400}",
        "a: &x {b: 1}\nc:\n  <<: *x\n  d: *x",
        "a: 2001-99-99\nb: !!str 3\nc: '${a}/x'\nd: ''",
        f"a: {'9' * 300}",
        "a: |\n" + "  text\n" * 1000,
    ],
)
def test_what_omegaconf_can_read_is_let_through(text):
    check_yaml(text)
    OmegaConf.create(text)


def test_a_value_of_the_command_line_is_checked_under_its_key():
    assert refusal(check_command, [f"a.b={'[' * 1000}"]).startswith("a.b.0.0.0")
    assert refusal(check_command, [f"a.b={NINES}"]).startswith("a.b: a whole number of 5000")
    assert refusal(check_command, [".".join("a" * 200) + "=1"]).startswith("a.a.a")
    assert refusal(check_command, ["a" + "[0]" * 200 + "=1"]).startswith("a[0][0]")
    assert refusal(check_command, ["~" + ".".join("a" * 200)]).startswith("~a.a.a")
    assert refusal(check_command, [f"a={'x' * (MAX_BYTES + 1)}"]).startswith("a: ")
    check_command(["a.b=[1, {c: 2}]", "~c", "d=", "e=None", "x.y.z=${a}"])


def test_a_file_that_is_none_is_named(tmp_path):
    (tmp_path / "long.yaml").write_bytes(b"# " + b"x" * MAX_BYTES)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    bad = [str(tmp_path), "/dev/zero", "/nowhere.yaml", "x" * 5000, "a\0b"]
    for path in [*bad, str(tmp_path / "long.yaml"), str(tmp_path / "latin.yaml")]:
        assert refusal(check_command, ["--config", path]).startswith("--config: ")


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"a": "${b}", "b": "${a}"}, "b"),
        ({"a": {"b": "${a}"}}, "a.b"),
        ({"a": "${.b}", "b": "${c.d}", "c": {"d": "${..b}"}}, "c.d"),
        ({f"a{n}": f"${{a{n + 1}}}" for n in range(500)}, "a"),
        ({f"a{n}": f"${{a{n + 1}}}" * 2 for n in range(18)} | {"a18": "x" * 99}, "a"),
        ({f"a{n}": {"l": f"${{a{n + 1}}}", "r": f"${{a{n + 1}}}"} for n in range(20)}, "a"),
        ({"a": {"b": "${oc.env:HOME}"}}, "a.b"),
        ({"a": [[10**400]]}, "a.0.0"),
        ({"a": -(10**5000)}, "a"),
    ],
)
def test_values_that_come_to_too_much_are_refused(given, key):
    assert refusal(check_values, given).startswith(key)


def test_values_are_nested_so_far_and_no_farther():
    deep = {}
    for _ in range(MAX_DEPTH - 1):
        deep = {"a": deep}
    check_values(deep)
    assert refusal(check_values, {"a": deep}).startswith("a.a.a")


def test_plain_interpolations_stay(tmp_path):
    check_values({"a": "${b}/${c.d[1]}", "b": "x", "c": {"d": [1, "${..e}", "${nowhere}"]}})


@pytest.mark.parametrize("override", [False, True])
def test_the_process_outlives_a_hundred_thousand_brackets(tmp_path, monkeypatch, capsys, override):
    """PyYAML and OmegaConf recurse: without the bound the process ends by a signal."""

    @config.parse
    def recipe_main(cfg):
        raise AssertionError("it was parsed")

    path, nest = tmp_path / "config.yaml", "[" * 60_000 + "]" * 60_000
    path.write_text("seed: 1\n" if override else f"seed: {nest}\n")
    argv = ["recipe", "--config", str(path)]
    monkeypatch.setattr("sys.argv", [*argv, f"seed={nest}"] if override else argv)
    assert exit_code(recipe_main) == 2
    err = capsys.readouterr().err
    assert err.startswith("config error: seed.0.0") and err.count("\n") == 1 and len(err) <= 301


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
