"""The stand-ins of the control plane's benchmark behave as roles; its table shows the driver."""

import asyncio
from types import SimpleNamespace

import control_plane
import numpy as np
from instant_roles import RESPONSE_TOKENS, InstantGenerator, InstantTrainer

from grpo_components.trajectory import concatenate, unpack


def test_an_instant_group_is_a_group_of_the_newest_weights():
    async def run():
        sampling = SimpleNamespace(group_size=4)
        generator = InstantGenerator(sampling=sampling, rollouts_in_flight=2)
        assert await generator.reserve(1) == 2
        old = await generator.generate_group({"prompt_index": 5}, 0, 7, 0, 1.0)
        await generator.load_weights(3)
        new = await generator.generate_group({"prompt_index": 6}, 0, 8, 0, 1.0)
        return old, new

    (old, old_summary, _), (new, new_summary, _) = asyncio.run(run())
    assert [(s.group_id, s.prompt_index) for s in (old_summary, new_summary)] == [(7, 5), (8, 6)]
    assert (old_summary.newest_version, new_summary.oldest_version) == (0, 3)
    batch = concatenate([old, new])
    for trajectory in unpack(batch):
        trajectory.check()
    result = InstantTrainer().train_step(batch, np.zeros(8), 0)
    assert result.token_versions == {0: 4 * RESPONSE_TOKENS, 3: 4 * RESPONSE_TOKENS}
    assert (result.policy_version, result.trained_tokens) == (1, 8 * RESPONSE_TOKENS)


def test_calls_keep_the_driver_busy_and_make_a_step_longer(monkeypatch):
    monkeypatch.setattr(control_plane, "SIZES", ((2, 1),))
    head, _, row = control_plane.virtual(0.05).splitlines()
    assert head.split("|")[1].strip() == "generators : trainers"
    size, free, real, _, busy = (cell.strip() for cell in row.split("|")[1:-1])
    assert size == "2 : 1" and float(real) > float(free) and 0 < float(busy[:-1]) <= 100
