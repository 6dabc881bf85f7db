"""Tokens are scored by the weights and the KV that their engine had, also over swaps of weights."""

import pytest
from lib.token_engine import policy, sample

from grpo_tools.audit.rescore import Scorer, segments

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", name="policies")
def _policies():
    return [policy(version) for version in range(4)]


@pytest.fixture(scope="module")
def folders(policies, tmp_path_factory):
    paths = [tmp_path_factory.mktemp(f"version_{n}") for n in range(len(policies))]
    for each, path in zip(policies, paths, strict=True):
        each.save_pretrained(path)
    return paths


def differences(folders, trajectories, recompute=False):
    todo = [part for n, t in enumerate(trajectories) for part in segments(t, n, recompute)]
    scorer, found = Scorer(), [0.0] * len(trajectories)
    for version in sorted({part.version for part in todo}):
        scorer.load(folders[version])
        pairs = [(part, trajectories[part.response]) for part in todo if part.version == version]
        scored = 0
        for part, values in scorer.logprobs(pairs):
            recorded = trajectories[part.response].generator_logprobs[part.first : part.end]
            found[part.response] = max(found[part.response], float(abs(values - recorded).max()))
            scored += 1
        assert scored == len(pairs)
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_a_response_over_swaps_of_weights_is_scored_by_each_of_them(policies, folders, recompute):
    versions = [0] * 3 + [1] + [2] * 4 + [3] * 2
    responses = [
        sample(policies, [3, 1, 4], versions, recompute=recompute),
        sample(policies, [1, 5, 9, 2], versions[2:], recompute=recompute),
        sample(policies, [6, 5], [0] * 6, recompute=recompute),
    ]
    assert max(differences(folders, responses, recompute)) < 1e-5
    wrong = differences(folders, responses, not recompute)
    assert wrong[0] > 1e-3 < wrong[1] and wrong[2] < 1e-5, "the KV decides"
