"""Tokens are scored by the weights and the KV that their engine had, also over swaps of weights."""

import pytest
from lib.token_engine import policy, sample

from grpo_tools.audit.rescore import Response, load_model, score, segments

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
    responses = [Response(f"{n}", t, t.response_mask) for n, t in enumerate(trajectories)]
    todo = [part for response in responses for part in segments(response, recompute)]
    found = [0.0] * len(responses)
    for version in sorted({part.version for part in todo}):
        parts, scored = [part for part in todo if part.version == version], 0
        for part, values in score(load_model(folders[version]), parts):
            recorded = part.response.trajectory.generator_logprobs[part.first : part.end]
            n = int(part.response.name)
            found[n] = max(found[n], float(abs(values - recorded).max()))
            scored += 1
        assert scored == len(parts)
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
