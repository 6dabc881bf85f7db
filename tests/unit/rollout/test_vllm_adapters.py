"""Real vLLM with adapters: a swap is for every request, and each token has its version."""

import numpy as np
import pytest
import torch
from lib.real_engine import ask, done, logprobs_of

from grpo_components.exchange.weights import BucketBuffers, pushed_layers
from grpo_components.models.lora import engine_scale, pushed_shapes
from grpo_components.rollout.schedule import Schedule
from grpo_components.settings import LoraSettings
from grpo_tools.replay.recorded_run import RecordedSchedule

LORA = LoraSettings(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj", "gate_proj"))
PREFIX = "base_model.model."
SWAPS = {16: 1, 32: 2}
"""Engine step -> version that is swapped in before it."""


def adapter(base, seed):
    random = torch.Generator().manual_seed(seed)
    return {
        name: 0.3 * torch.randn(shape, generator=random)
        for name, shape in pushed_shapes(base, LORA).items()
    }


def logprobs(base, adapter, prompt, completion):
    """Logprobs of a completion by the base model with an adapter merged into it."""

    def merge(model):
        state = model.state_dict()
        for name in adapter or {}:
            if "lora_A" in name:
                added = adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
                state[name.removeprefix(PREFIX).replace("lora_A.", "")] += LORA.scale * added

    return logprobs_of(base, prompt, completion, merge)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_running_requests_go_on_with_each_new_adapter(make_engine, checkpoints, workers):
    base = checkpoints / "untied_A"
    prompts = [[5, 6, 7, number] for number in range(2)]
    entries = [(0, "request 0"), *((step, f"weights {v}") for step, v in SWAPS.items())]
    entries.append((32, "request 1"))
    schedule = Schedule(recorded=RecordedSchedule(entries, 60))
    engine = make_engine(
        base, recompute_kv_after_pull=True, schedule=schedule, lora=LORA, workers=workers
    )
    versions = {0: None, **{version: adapter(base, version) for version in SWAPS.values()}}
    requests = [
        ask(engine, prompt, 48 - 16 * number, seed=number, name=f"request {number}")
        for number, prompt in enumerate(prompts)
    ]
    for version, given in list(versions.items())[1:]:
        copies = {name: tensor.clone() for name, tensor in given.items()}
        engine.load_weights(version, copies)
    completions = done(requests)
    versions_of = [[0] * 16 + [1] * 16 + [2] * 16, [2] * 32]
    assert [c.token_versions.tolist() for c in completions] == versions_of
    for prompt, completion in zip(prompts, completions, strict=True):
        for version, given in versions.items():
            own = completion.token_versions == version
            expected = logprobs(base, given, prompt, completion)
            # With their KV recomputed, tokens are those of the one adapter.
            np.testing.assert_allclose(completion.logprobs[own], expected[own], atol=1e-4)
    kept = engine._backend._engine.collective_rpc("list_loras")
    assert kept == [{1}] * workers, "no other is kept"


def test_an_adapter_of_other_layers_is_refused_and_nothing_changes(make_engine, checkpoints):
    base = checkpoints / "tied_A"
    engine = make_engine(base, lora=LORA)
    given = adapter(base, 1)
    *_, last = given
    for wrong, problem in (
        ({name: t for name, t in given.items() if name != last}, f"missing tensor {last}"),
        (given | {f"{PREFIX}lm_head.lora_A.weight": torch.ones(4, 64)}, "unknown tensor"),
        (given | {last: given[last][:, :2]}, f"{last} has shape"),
    ):
        with pytest.raises(ValueError, match=problem.replace(".", r"\.")):
            engine.load_weights(1, wrong)
    completion = ask(engine, [5, 6], 8).result()
    assert completion.token_versions.tolist() == [0] * 8
    expected = logprobs(base, None, [5, 6], completion)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("alpha", [4.0, 8.0, 9.3])
def test_an_adapter_in_the_engine_has_the_hashes_of_the_pushed_one(
    make_engine, checkpoints, alpha, workers
):
    """In bf16; vLLM fuses parts of A and B, cuts them, and multiplies B by the scale."""
    base, lora = checkpoints / "untied_A", LORA.model_copy(update={"alpha": alpha})
    engine = make_engine(base, lora=lora, dtype="bf16", workers=workers)
    given = {name: tensor.bfloat16() for name, tensor in adapter(base, 1).items()}

    def pushed():
        bucket = BucketBuffers(sum(t.nbytes for t in given.values()), pinned=False).bucket()
        for name, tensor in given.items():
            bucket.add(name, tensor, engine_scale(name, lora))
        return pushed_layers([bucket.close()[0]])

    found = engine.load_weights(1, given).result(timeout=60).layers
    assert found == pushed()
    given[f"{PREFIX}model.layers.1.self_attn.v_proj.lora_B.weight"] *= 2
    other = engine.load_weights(2, given).result(timeout=60).layers
    assert other == pushed()
    assert [name for name in found if found[name] != other[name]] == ["layer 1"]
