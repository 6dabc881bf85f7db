"""However the ranks are laid out, they make one rank's update; over gloo, with up to four ranks.

Updates are by SGD, whose steps are the gradients: Adam would magnify round-off to whole steps.
"""

from functools import partial

import pytest
import torch
from equivalence.families import FAMILIES, random_checkpoint
from lib.trainer_ranks import (
    ADVANTAGES,
    SIBLINGS,
    SMALL,
    Ranks,
    assert_metrics_close,
    assert_weights_close,
    assert_weights_equal,
    export,
    exported,
    step,
)
from safetensors.torch import load_file

from grpo_components.models.meshes import Sharding
from grpo_components.objective.composition import Penalties
from grpo_components.objective.losses import GRPOLoss
from grpo_components.schedules import Schedule

MODELS = ("QWEN2 (tied)", "QWEN2 (untied)", "LLAMA3_2")
LAYOUTS = [
    (2, Sharding(replicate=2)),
    (2, Sharding(tensor=2)),
    (4, Sharding()),
    (4, Sharding(replicate=2)),
    (4, Sharding(tensor=2)),
    (4, Sharding(replicate=2, tensor=2)),
]
CLIPPED = {"clip_grad_norm": 0.05}


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return {
        name: random_checkpoint(FAMILIES[name], tmp_path_factory.mktemp("base"), seed=0)
        for name in MODELS
    }


@pytest.fixture(scope="module")
def run(ranks, bases):
    """Train two steps of a model on a layout: exported weights before and after, and metrics."""

    def run(name, num_ranks, sharding, calls=None, **changes):
        there, back = step(SIBLINGS, ADVANTAGES), step(SIBLINGS, -ADVANTAGES)
        calls = calls or [*export(0), there, *export(1), back, *export(2)]
        model_type, build_model, _ = FAMILIES[name]
        options = {"build_model": build_model, "model_type": model_type, "sharding": sharding}
        return ranks.run(bases[name], num_ranks, calls, **options, **changes)

    return run


@pytest.fixture(scope="module")
def one_rank(run):
    return {name: run(name, 1, Sharding(), **CLIPPED) for name in MODELS}


@pytest.mark.parametrize(
    ("name", "num_ranks", "sharding"),
    [("QWEN2 (tied)", num_ranks, sharding) for num_ranks, sharding in LAYOUTS]
    + [("QWEN2 (untied)", 2, Sharding(tensor=2)), ("LLAMA3_2", 4, Sharding(tensor=2))],
)
def test_a_layout_makes_the_update_of_one_rank(run, one_rank, bases, name, num_ranks, sharding):
    """Weights exported, metrics, and clipping by the norm over all shards of all meshes."""
    results = run(name, num_ranks, sharding, tokens_per_micro_batch=SMALL, **CLIPPED)
    expected = one_rank[name]
    assert_weights_equal(exported(results, 1), load_file(bases[name] / "model.safetensors"))
    for call in (2, 5):
        assert expected[0][call]["grad_norm"] > CLIPPED["clip_grad_norm"]
        for rank_results in results:
            assert_metrics_close(rank_results[call], expected[0][call])
    for call in (4, 7):
        assert_weights_close(exported(results, call), exported(expected, call))


@pytest.mark.parametrize(
    ("name", "sharding"),
    [
        ("QWEN2 (tied)", Sharding(tensor=2)),
        ("QWEN2 (tied)", Sharding(replicate=2, tensor=2)),
        ("QWEN2 (untied)", Sharding(tensor=2)),
    ],
)
def test_activation_checkpointing_and_fused_adamw_work_on_every_mesh(run, name, sharding):
    optimizer = partial(torch.optim.AdamW, lr=0.1, eps=1.0, fused=True)  # steps like gradients
    changes = {"build_optimizer": optimizer, "enable_activation_checkpointing": True}
    expected = run(name, 1, Sharding(), **changes)
    results = run(name, 4, sharding, **changes)
    assert_weights_close(exported(results, 7), exported(expected, 7))


@pytest.mark.parametrize("sharding", [Sharding(replicate=2), Sharding(tensor=2)])
def test_a_checkpoint_holds_the_weights_of_every_layout(run, tmp_path, sharding):
    trained = [step(SIBLINGS, ADVANTAGES), *export(1)]
    save = [("hold_state", True), ("write_state", str(tmp_path))]
    results = run("QWEN2 (tied)", 2, sharding, calls=[*trained, *save])
    assert_weights_equal(load_file(tmp_path / "model.safetensors"), exported(results, 2))
    for other in (Sharding(), sharding):  # each layout goes on from what any other saved
        load = [("load_state", str(tmp_path)), *export(1)]
        restored = run("QWEN2 (tied)", 2, other, calls=load)
        assert_weights_equal(exported(restored, 2), exported(results, 2))


def test_gradients_reduced_in_bf16_are_rounded_and_close(run):
    """The masters stay in float32: it is the updates that are rounded."""
    exact, rounded = (
        run("QWEN2 (tied)", 2, Sharding(reduce_dtype=dtype)) for dtype in ("fp32", "bf16")
    )
    before, exact, rounded = exported(exact, 1), exported(exact, 4), exported(rounded, 4)
    for name, start in before.items():
        update, other = exact[name] - start, rounded[name] - start
        torch.testing.assert_close(other, update, rtol=0.05, atol=0.01 * update.abs().max().item())
    assert any(not torch.equal(exact[name], rounded[name]) for name in exact)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["QWEN2 (tied)", "QWEN2 (untied)"])
def test_compiled_layers_softmax_and_loss_make_the_same_update(run, name):
    """The loss has a schedule: a new step is no new graph."""
    schedule = Schedule("linear", start=0.2, end=0.1, num_steps=9)
    changes = {"loss": GRPOLoss(clip_low=schedule), "penalties": Penalties(kl_coeff=0.1)}
    changes |= {"tokens_per_micro_batch": SMALL}
    expected = run(name, 1, Sharding(), **changes)
    changes |= {"compile": True, "enable_activation_checkpointing": True}
    results = run(name, 2, Sharding(), **changes)
    assert_weights_close(exported(results, 7), exported(expected, 7))
    assert_metrics_close(results[0][5], expected[0][5])
