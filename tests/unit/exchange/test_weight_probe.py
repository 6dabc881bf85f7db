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


@pytest.mark.parametrize(
    ("max_kl", "found", "facts"),
    [  # the first even where the KL is far below its bound, as in bf16
        (0.05, lambda pushed: pushed[1], "generator_0 pulled version 3.*nearer to version 1"),
        (
            1e-4,
            lambda pushed: pushed[3] + np.resize([0.1, -0.1], len(BASE)),
            "probe of 39 tokens is .*allowed is 0.0001",
        ),
        (1e-4, lambda pushed: pushed[3][:5] + 1, "probe of 5 tokens"),
    ],
)
def test_earlier_and_other_weights_are_named_by_the_tokens_that_fit(max_kl, found, facts):
    made, pushed = probe(max_kl)
    made.check("generator_0", 3, reading(3, pushed[3][:5]))
    with pytest.raises(DisagreementError, match=facts):
        made.check("generator_0", 3, reading(3, found(pushed)))


def test_nothing_is_compared_without_a_bound_a_push_or_an_engine():
    made, pushed = probe(max_kl=None)
    made.check("generator_0", 3, reading(3, pushed[3] + 1))
    made, pushed = probe()
    made.check("generator_0", 3, None)
    made.check("generator_0", 4, reading(4, pushed[3] + 1))
    made.forget()  # another attempt gives the same numbers to other weights
    made.check("generator_0", 3, reading(3, pushed[3] + 1))


def test_rounding_of_bf16_is_no_disagreement_where_weights_cannot_be_compared():
    """Another version is nearer by chance, unless the distance is unusual, too."""
    made, pushed = probe(max_kl=0.05, drift=1e-3)
    layers = {"layer 0": 1}
    for seed in range(200):
        found = pushed[2] + np.random.default_rng(seed).normal(0, 2e-3, len(BASE))
        made.check("generator_0", 2, reading(2, found), layers)
    with pytest.raises(DisagreementError, match="nearer to version 2"):
        made.pushed(4, (BASE + 0.05).tolist())
        made.check("generator_0", 4, reading(4, pushed[2]), layers)


def test_weights_are_compared_without_a_bound_and_logprobs_are_bounded_where_they_agree():
    layers, made = {"layer 0": 1, "layer 1": 2, "the rest": 3}, WeightProbe(None)
    found = ProbeReading([-1.0], 3, 0, layers | {"layer 1": 5})
    with pytest.raises(DisagreementError, match=r"layer 1 \(of no version that was pulled\)\."):
        made.check("generator_0", 3, found, layers)
    made, pushed = probe(max_kl=0.05)
    made.check("generator_0", 3, ProbeReading(pushed[1].tolist(), 3, 0, layers), layers)
    with pytest.raises(DisagreementError, match="allowed is"):
        made.check("generator_0", 3, ProbeReading((pushed[3] + 1).tolist(), 3, 0, layers), layers)


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
