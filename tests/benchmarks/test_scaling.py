"""The benchmark of growing work compares each case with the first of its kind."""

import json

from scaling import CASES, MAX_TOKENS, POLICY, long_policy, table


def test_each_case_stands_beside_the_first_of_its_kind():
    measured = {(kind, name): [4.0, 6.0, 5.0] for kind, cases in CASES.items() for name in cases}
    measured["prompt length", "x 16"] = [20.0]
    text = table(measured)
    assert "| prompt length: x 16 | 20.00 (20.00..20.00) | 4.00 |" in text
    assert "| generators: 4 | 5.00 (4.00..6.00) | 1.00 |" in text
    assert text.count("```mermaid") == 3 and "bar [5.00, 5.00, 20.00]" in text


def test_the_copied_policy_takes_the_longest_prompt(tiny_policy, tmp_path):
    copy = json.loads((long_policy(tmp_path) / "config.json").read_text())
    assert copy.pop("max_position_embeddings") == MAX_TOKENS
    before = json.loads((POLICY / "config.json").read_text())
    assert copy == {name: before[name] for name in copy}
