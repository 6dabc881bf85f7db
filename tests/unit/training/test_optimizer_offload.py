"""An optimizer's state leaves the device and comes back to the bit, with every tensor of it."""

from functools import partial

import numpy as np
import pytest
import torch
from lib.trainer_ranks import ADVANTAGES, RAGGED, assert_weights_equal, export, exported, step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from grpo_components.training.optimizer_offload import state_on_device
from grpo_tools.memory_plan.live_bytes import imagined_ranks

CPU = torch.device("cpu")
OPTIMIZERS = {
    "fused AdamW": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "AMSGrad": partial(torch.optim.AdamW, lr=0.1, amsgrad=True, fused=False),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "none": partial(torch.optim.SGD, lr=0.1),
}


def parameters(seed=0, sharded=False):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(6, 4, generator=generator), torch.randn(5, generator=generator)]
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        values = [distribute_tensor(value, mesh, [Shard(0)]) for value in values]
    return [torch.nn.Parameter(value) for value in values]


def update(optimizer, weights):
    optimizer.zero_grad()
    sum((weight.sin() * weight).sum() for weight in weights).backward()
    optimizer.step()


def tensors(optimizer):
    """Every tensor of the state, by where it is; of a DTensor what this rank has."""
    return {
        (id(weight), name): each.to_local() if isinstance(each, DTensor) else each
        for weight, state in optimizer.state.items()
        for name, each in state.items()
        if isinstance(each, torch.Tensor) and each.ndim > 0
    }


@pytest.mark.parametrize(
    ("name", "sharded"),
    [(name, False) for name in OPTIMIZERS] + [("fused AdamW", True), ("AMSGrad", True)],
)
def test_between_two_steps_all_of_the_state_is_elsewhere_and_no_bit_changes(name, sharded):
    with imagined_ranks(2):
        weights, expected = parameters(sharded=sharded), parameters(sharded=sharded)
        optimizer, plain = OPTIMIZERS[name](weights), OPTIMIZERS[name](expected)
        for _ in range(3):
            with state_on_device(optimizer, CPU, active=True) as metrics:
                update(optimizer, weights)
                on_device = tensors(optimizer)
                values = {where: tensor.clone() for where, tensor in on_device.items()}
            update(plain, expected)
            away = tensors(optimizer)
            assert away.keys() == on_device.keys() and bool(away) == (name != "none")
            for where, tensor in away.items():
                assert tensor.data_ptr() != on_device[where].data_ptr()
                assert torch.equal(tensor, values[where])
            assert all(weight.grad is None for weight in weights)
            assert metrics.keys() == {"time/offload"} and metrics["time/offload"] >= 0
        for weight, other in zip(weights, expected, strict=True):
            whole = [w.to_local() if sharded else w for w in (weight, other)]
            assert torch.equal(*whole)


def test_the_state_of_parameters_that_are_offloaded_stays_beside_them():
    """With `fsdp_cpu_offload`, which has parameters and gradients on the CPU."""
    weights, gpu = parameters(), torch.device("meta")
    optimizer = OPTIMIZERS["AMSGrad"](weights)
    for _ in range(2):
        with state_on_device(optimizer, gpu, active=True):
            update(optimizer, weights)
            before = {where: tensor.data_ptr() for where, tensor in tensors(optimizer).items()}
        after = {where: tensor.data_ptr() for where, tensor in tensors(optimizer).items()}
        assert after == before and {each.device for each in tensors(optimizer).values()} == {CPU}
        assert all(weight.grad is None for weight in weights)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_trainer_that_takes_turns_makes_the_same_bits_and_checkpoints(
    ranks, base, tmp_path, num_ranks
):
    saved, rest = str(tmp_path / "saved"), [step(RAGGED[::-1], np.flip(ADVANTAGES), 1), *export(2)]
    calls = [step(RAGGED, ADVANTAGES), ("hold_state", False), ("write_state", saved), *rest]
    found = {}
    for colocate in (False, True):
        changes = {"build_optimizer": OPTIMIZERS["fused AdamW"], "colocate": colocate}
        results = ranks.run(base, num_ranks, calls, **changes)
        assert ("time/offload" in results[0][0]) == colocate
        resumed = ranks.run(base, num_ranks, [("load_state", saved), *rest], **changes)
        found |= {(colocate, 0): exported(results, 5), (colocate, 1): exported(resumed, 3)}
    for weights in found.values():
        assert_weights_equal(weights, found[False, 0])
