"""In bf16 no sound pull gives an alarm, and what else an engine may hold is named.

The rules, probe, hashes and engine are those of a run; a policy gradient makes the versions.
"""

import re

import numpy as np
import pytest
import torch
from lib.real_engine import weights

from grpo_components.errors import DisagreementError
from grpo_components.exchange.weight_probe import WeightProbe
from grpo_components.exchange.weights import pack_bucket, pushed_layers
from grpo_components.models.loading import load_hugging_face
from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.training.token_logprobs import probe_logprobs
from grpo_components.trajectory import TokenSequence

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("one_thread")]
PULLS, PLANTED_EVERY, CPU = 700, 20, torch.device("cpu")
BF16_MAX_KL = 0.05


def versions(base, lr):
    """Yield a policy's weights and probe in bf16 after each step of AdamW in float32."""
    master, compute = (load_hugging_face(base, dtype) for dtype in (torch.float32, torch.bfloat16))
    numbers, logprobs = np.random.default_rng(0), ResponseLogprobs(master, chunk_tokens=4096)
    probe = ResponseLogprobs(compute, chunk_tokens=4096)
    optimizer = torch.optim.AdamW(master.parameters(), lr=lr, weight_decay=0.0)
    while True:
        rows = numbers.integers(3, 250, (8, 24))
        advantages = torch.from_numpy(numbers.choice((-1.0, 1.0), 8).repeat(12)).float()
        batch = token_batch([TokenSequence(row[:12], row[12:], 1.0) for row in rows])
        optimizer.zero_grad()
        (-advantages * logprobs(batch)[0]).mean().backward()
        torch.nn.utils.clip_grad_norm_(master.parameters(), 1.0)
        optimizer.step()
        compute.load_state_dict(master.state_dict())
        state = {name: tensor.clone() for name, tensor in compute.state_dict().items()}
        yield state, probe_logprobs(probe, CPU)


def planted(now, before):
    """What a faulty load may leave in an engine, and what the error says of it."""
    some = {part: {n: (before if part in n else now)[n] for n in now} for part in ("s.1.", "1.mlp")}
    other = {f"layers.{number}": f"layers.{1 - number}" for number in (0, 1)}
    swapped = {re.sub(r"layers\.\d", lambda m: other[m[0]], name): now[name] for name in now}
    return {
        "stale": (before, r"pushed: layer 0, layer 1, the rest \(of version \d+\)\."),
        "a stale layer": (some["s.1."], r"pushed: layer 1 \(of version \d+\)\."),
        "a stale part": (some["1.mlp"], r"pushed: layer 1 \(of no version"),
        "exchanged": (swapped, r"layer 0, layer 1 \(of no version"),
    }


@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-4])
def test_sound_pulls_give_no_alarm_and_others_are_named(make_engine, checkpoints, monkeypatch, lr):
    from vllm import _custom_ops

    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)  # as on a GPU: nothing is packed
    base = checkpoints / "untied_A"
    names = weights(base)
    engine, rules, before = make_engine(base, dtype="bf16"), WeightProbe(BF16_MAX_KL), None
    for version, (state, logprobs) in zip(range(1, PULLS + 1), versions(base, lr), strict=False):
        now = {name: state[name] for name in names}
        layers = pushed_layers([pack_bucket([*now.items()])[0]])
        rules.pushed(version, logprobs)
        if before is not None and version % PLANTED_EVERY == 0:
            for found, named in planted(now, before).values():
                reading = engine.load_weights(version, found).result(timeout=60)
                with pytest.raises(DisagreementError, match=named):
                    rules.check("generator_0", version, reading, layers)
        reading = engine.load_weights(version, now).result(timeout=60)
        assert reading.layers is not None
        rules.check("generator_0", version, reading, layers)  # raises an error at an alarm
        before = now
