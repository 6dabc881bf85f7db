"""The weight probe names a generator whose weights are not those of the version that it names."""

import numpy as np
import pytest

from grpo_components.errors import DisagreementError
from grpo_components.exchange.weight_probe import PROBE_IDS, ProbeReading, WeightProbe

BASE = np.linspace(-9.0, -0.5, len(PROBE_IDS) - 1)


def reading(version, logprobs, cached_tokens=0):
    return ProbeReading(logprobs.tolist(), version, cached_tokens)


def probe(max_kl=1e-4, drift=1e-2):
    """A probe after three pushes; the policy moves by `drift` nats from one to the next."""
    made, numbers = WeightProbe(max_kl), np.random.default_rng(0)
    pushed = {}
    for version in (1, 2, 3):
        pushed[version] = BASE + numbers.normal(0, drift * version, len(BASE))
        made.pushed(version, pushed[version].tolist())
    return made, pushed


@pytest.mark.parametrize("drift", [0.0, 1e-7, 1e-2])
@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-3])
def test_rounding_is_no_disagreement_however_little_the_policy_moves(drift, noise):
    made, pushed = probe(drift=drift)
    for seed in range(50):
        numbers = np.random.default_rng(seed)
        found = pushed[2] + numbers.normal(0, noise, len(BASE))
        made.check("generator_0", 2, reading(2, found))


def test_a_generator_that_kept_earlier_weights_is_named_with_their_version():
    """Even where the KL is far below its bound, as in bf16."""
    made, pushed = probe(max_kl=0.05)
    with pytest.raises(
        DisagreementError, match=r"generator_0 pulled version 3.*nearer to version 1"
    ):
        made.check("generator_0", 3, reading(3, pushed[1]))


def test_other_weights_are_named_by_their_kl():
    made, pushed = probe()
    with pytest.raises(DisagreementError, match=r"probe of 39 tokens is .*allowed is 0.0001"):
        made.check("generator_0", 3, reading(3, pushed[3] + np.resize([0.1, -0.1], len(BASE))))


def test_only_tokens_that_fit_are_compared():
    made, pushed = probe()
    made.check("generator_0", 3, reading(3, pushed[3][:5]))
    with pytest.raises(DisagreementError, match=r"probe of 5 tokens"):
        made.check("generator_0", 3, reading(3, pushed[3][:5] + 1))


def test_nothing_is_compared_without_a_bound_a_push_or_an_engine():
    made, pushed = probe(max_kl=None)
    made.check("generator_0", 3, reading(3, pushed[3] + 1))
    made, pushed = probe()
    made.check("generator_0", 3, None)
    made.check("generator_0", 4, reading(4, pushed[3] + 1))
    made.forget()  # another attempt gives the same numbers to other weights
    made.check("generator_0", 3, reading(3, pushed[3] + 1))


def test_a_few_versions_are_kept():
    made, pushed = probe()
    for version in range(4, 200):
        made.pushed(version, BASE.tolist())
    made.check("generator_0", 3, reading(3, pushed[3] + 1))
    with pytest.raises(DisagreementError):
        made.check("generator_0", 199, reading(199, BASE + 1))


@pytest.mark.parametrize("max_kl", [None, 1e-4])
@pytest.mark.parametrize(
    ("label", "cached", "facts"),
    [
        (2, 0, "but labels .* version 2:"),
        (4, 0, "but labels .* version 4:"),
        (3, 32, "but read 32 .* prefix cache"),
    ],
)
def test_a_generator_with_another_label_or_a_cache_of_earlier_weights_is_named(
    max_kl, label, cached, facts
):
    made, pushed = probe(max_kl)
    with pytest.raises(DisagreementError, match=f"generator_0 pulled version 3, {facts}"):
        made.check("generator_0", 3, reading(label, pushed[3][: 0 if cached else None], cached))
