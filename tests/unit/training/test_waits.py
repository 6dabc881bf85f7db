"""The host runs ahead of a GPU while it makes an update. The GPU of these tests does not exist."""

from collections import Counter

import pytest
from lib.role_process import RoleProcess
from lib.trainer_ranks import ADVANTAGES, SMALL, WHOLE, fresh, trainer_arguments

from grpo_components.objective.off_policy import NoCorrection, SequenceTIS

AFTER_AN_UPDATE = {
    "training/trainer.py:clip_grad_norm",
    "training/token_metrics.py:over_ranks",
    "training/trainer.py:_update",
}
AFTER_THE_STEP = {
    "training/token_logprobs.py:gather_logprobs",
    "training/token_logprobs.py:probe_logprobs",
    "training/token_use.py:_over_ranks",
}
ONCE = "objective/contracts.py:check_first_weights"


@pytest.fixture(scope="module")
def gpu():
    process = RoleProcess("lib.fake_gpu.GpuSteps")
    yield process
    process.close()


@pytest.mark.parametrize(
    "what, events",
    [
        ("x + 1", ["kernel"]),
        ("torch.ones(4, pin_memory=True)[:2].to('gpu', non_blocking=True)", ["sent"]),
        ("torch.ones(4, pin_memory=True).to('gpu')", ["waited"]),
        ("torch.ones(4).to('gpu', non_blocking=True)", ["waited"]),
        ("x.cpu()", ["waited"]),
        ("x.sum().item()", ["kernel", "waited"]),
        ("x[x > 0]", ["kernel", "waited"]),
        ("x.long().bincount()", "DynamicOutputShapeException"),
        ("x + torch.ones(4)", "FakeTensorDeviceMismatchError"),
    ],
)
def test_the_fake_gpu_tells_what_waits(gpu, what, events):
    assert gpu.call("of", what) == events


@pytest.mark.parametrize(
    "correction, epochs, has_flash, copies, kernels",
    [
        (NoCorrection(), 1, True, 3, 470),
        (SequenceTIS(), 2, True, 8, 1150),
        (SequenceTIS(), 2, False, 17, 1350),
    ],
    ids=["one epoch", "two epochs", "two epochs in blocks"],
)
def test_the_host_waits_after_an_update_and_not_for_its_micro_batches(
    gpu, correction, epochs, has_flash, copies, kernels
):
    """Copies to the GPU, and the most kernels, are those of one micro-batch in all its passes."""
    found = []
    for budget in (WHOLE, SMALL):  # one and three micro-batches
        changes = {"off_policy": correction, "ppo_epochs": epochs, "logged_responses": 2}
        changes |= {"dtype": "bf16", "tokens_per_micro_batch": budget}
        arguments = trainer_arguments("", 0, 1, None, "", **changes)
        events = gpu.call("events", arguments, fresh(), ADVANTAGES, has_flash)
        places = [where for what, where in events if what == "waited"]
        first = next(where for where in places if where != ONCE)
        assert first == "training/trainer.py:clip_grad_norm"
        found.append((Counter(places), Counter(what for what, _ in events)))
    (waits, one), (same_waits, three) = found
    assert waits == same_waits and waits[ONCE] <= 1
    assert waits.keys() <= AFTER_AN_UPDATE | AFTER_THE_STEP | {ONCE}
    assert three["sent"] - one["sent"] == 2 * copies
    assert three["kernel"] - one["kernel"] <= 2 * kernels
