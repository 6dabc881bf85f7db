"""Both kinds of policy do the same work in the benchmark."""

import policy_kinds


def test_both_kinds_have_the_same_loss():
    row = policy_kinds.measure(policy_kinds.Setting(5, 3, groups=2, group_size=3), repeats=1)
    assert row[0] == "5 / 3"
    assert float(row[-1]) < 1e-5
