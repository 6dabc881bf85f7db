"""Steps of the real trainer over gloo: versions, rates, skipped steps, exports, checkpoints."""

import gzip
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from lib.trainer_ranks import (
    ADVANTAGES,
    LEARNING_RATE,
    LOPSIDED,
    RAGGED,
    HalfBlind,
    SquaredLogprobs,
    assert_weights_close,
    assert_weights_equal,
    expected_update,
    export,
    exported,
    hf_weights,
    step,
    untimed,
)
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit
from torchtune.training import setup_torch_profiler

from grpo_components.schedules import Schedule
from grpo_components.training.token_metrics import over_updates
from grpo_components.training.weight_export import WeightExport

HALF, OF_LOPSIDED = len(LOPSIDED) // 2, np.resize(ADVANTAGES, len(LOPSIDED))

# ---- steps, versions, rates ---------------------------------------------------------------------


def decay(optimizer):
    """A scheduler whose rate says how often it has stepped."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_trains_nothing_and_spoils_nothing(ranks, base, bad):
    spoiled = ADVANTAGES.copy()
    spoiled[-1] = bad  # on one rank only
    adam = partial(torch.optim.AdamW, lr=1e-2)
    calls = [step(RAGGED, spoiled), *export(0), step(RAGGED, ADVANTAGES), *export(1)]
    results = ranks.run(base, 2, calls, build_optimizer=adam, build_lr_scheduler=decay)
    for skipped, version, _, trained, *_ in results:
        assert not math.isfinite(skipped["grad_norm"])
        assert skipped["policy_version"] == version == 0
        assert trained["policy_version"] == 1 and math.isfinite(trained["grad_norm"])
        assert trained["lr"] == skipped["lr"] == 1e-2, "the schedule counts trained batches"
    assert_weights_equal(exported(results, 2), hf_weights(base))
    undisturbed = ranks.step(base, 2, RAGGED, ADVANTAGES, build_optimizer=adam)
    assert_weights_equal(exported(results, 5), exported(undisturbed, 2))


def test_a_loss_that_is_no_number_trains_nothing_even_if_its_gradient_is_one(ranks, base):
    calls = [step(RAGGED, ADVANTAGES), *export(0)]
    results = ranks.run(base, 2, calls, loss=HalfBlind())
    for measured, *_ in results:
        assert math.isnan(measured["loss/total"]) and math.isfinite(measured["grad_norm"])
        assert measured["policy_version"] == 0 and measured["skipped_steps"] == 1
    assert_weights_equal(exported(results, 2), hf_weights(base))


def test_a_learning_rate_schedule_follows_the_training_step(ranks, base):
    schedule = Schedule("linear", start=0.4, end=0.1, num_steps=3, warmup_steps=1)
    steps = [step(RAGGED, ADVANTAGES, number) for number in (0, 1, 2, 7)]
    results = ranks.run(base, 1, steps, learning_rate=schedule)[0]
    assert [metrics["lr"] for metrics in results] == pytest.approx([0.4, 0.4, 0.3, 0.1])


def test_fresh_tokens_of_several_updates_weigh_alike_and_a_step_may_have_none():
    parts = [
        {"mismatch/fresh_kl": 0.5, "mismatch/fresh_tokens": 3.0},
        {"mismatch/generator_kl": 0.1},  # an update without a fresh token
        {"mismatch/fresh_kl": 0.1, "mismatch/fresh_tokens": 9.0},
    ]
    metrics = over_updates(parts)
    assert metrics["mismatch/fresh_kl"] == pytest.approx((0.5 * 3 + 0.1 * 9) / 12)
    assert metrics["mismatch/fresh_tokens"] == 12
    none = over_updates(parts[1:2])
    assert math.isnan(none["mismatch/fresh_kl"]) and math.isnan(none["mismatch/fresh_tokens"])


def test_a_bad_update_leaves_the_good_ones_of_its_batch(ranks, base):
    weights, _ = expected_update(base, LOPSIDED[:HALF], OF_LOPSIDED[:HALF])
    both = np.where(np.arange(len(LOPSIDED)) < HALF, OF_LOPSIDED, math.nan)
    results = ranks.step(base, 1, LOPSIDED, both, updates_per_batch=2)
    assert results[0][0]["policy_version"] == 1
    assert_weights_close(exported(results, 2), weights)


def test_a_batch_is_one_version_and_one_step_of_the_schedule_whatever_its_updates(ranks, base):
    steps = [step(RAGGED, ADVANTAGES)] * 3
    changes = {"build_lr_scheduler": decay, "ppo_epochs": 2, "updates_per_batch": 2}
    results = ranks.run(base, 1, steps, **changes)[0]
    assert [metrics["policy_version"] for metrics in results] == [1, 2, 3]
    rates = [LEARNING_RATE, LEARNING_RATE / 2, LEARNING_RATE / 4]
    assert [metrics["lr"] for metrics in results] == pytest.approx(rates)


def test_every_epoch_and_part_of_a_batch_is_an_update_of_its_own(ranks, base):
    """Two epochs of two parts are the four steps on the parts."""
    halves = slice(HALF), slice(HALF, None)
    parts = [step(LOPSIDED[half], OF_LOPSIDED[half]) for half in halves]
    singly = ranks.run(base, 1, [*parts, *parts, *export(4)])
    together = ranks.step(base, 1, LOPSIDED, OF_LOPSIDED, ppo_epochs=2, updates_per_batch=2)
    assert_weights_equal(exported(together, 2), exported(singly, 5))
    metrics, updates = together[0][0], singly[0][:4]
    assert metrics["ratio/max"] == max(update["ratio/max"] for update in updates)
    for key in ("loss/total", "grad_norm", "ratio/mean", "ratio/clip_fraction"):
        assert metrics[key] == pytest.approx(sum(update[key] for update in updates) / 4), key
    key = "mismatch/generator_kl"  # before any update
    assert metrics[key] == pytest.approx(updates[0][key])


def test_what_a_loss_does_not_measure_is_logged_as_nan_under_the_same_keys(ranks, base):
    plain = ranks.step(base, 1, RAGGED, ADVANTAGES, loss=SquaredLogprobs())[0][0]
    full = ranks.step(base, 1, RAGGED, ADVANTAGES)[0][0]
    assert plain.keys() == full.keys()
    missing = {k for k, value in plain.items() if isinstance(value, float) and math.isnan(value)}
    clipped = {f"ratio/clip_fraction{end}" for end in ("", "_low", "_high")}
    assert missing == {"loss/penalty", *clipped}
    assert plain["ratio/max"] == full["ratio/max"] and plain["ratio/mean"] == full["ratio/mean"]


def test_the_profiler_steps_with_training_and_leaves_a_trace_per_rank(ranks, base, tmp_path):
    cycle = {"wait_steps": 1, "warmup_steps": 0, "active_steps": 1, "num_cycles": 0}
    given = {"enabled": True, "cuda": False, "xpu": False, "output_dir": str(tmp_path)}
    profiler = partial(setup_torch_profiler, **given, **cycle)
    steps = [step(RAGGED, ADVANTAGES)] * 3  # the third cycle is cut short
    plain = ranks.run(base, 2, steps)
    profiled = ranks.run(base, 2, steps, build_profiler=profiler)
    # As text: NaN, of a step without fresh tokens, is not equal to itself.
    assert [repr(untimed(m)) for m in profiled[0]] == [repr(untimed(m)) for m in plain[0]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration_2", "iteration_3"]
    traces = list((tmp_path / "iteration_2").glob("*.pt.trace.json.gz"))
    assert len(traces) == 2
    for trace in traces:
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert "aten::mm" in {event["name"] for event in events}
    assert (tmp_path / "iteration_2" / "rank1_key_averages.txt").is_file()


def test_peak_memory_is_logged_when_asked_for(ranks, base):
    metrics = ranks.step(base, 1, RAGGED, ADVANTAGES, log_peak_memory_stats=True)[0][0]
    assert 0.01 < metrics["memory/trainer_peak_gib"] < 100


# ---- weights on their way out -------------------------------------------------------------------


def test_a_buffer_is_exported_in_its_own_dtype():
    """Some routers keep a bias as a float32 buffer, whose small differences choose the experts."""
    router = torch.nn.Linear(4, 2, bias=False)
    router.register_buffer("choice_bias", torch.tensor([5.0154, 4.9971]))
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([router])})
    export = WeightExport(model, dict, torch.bfloat16, torch.device("cpu"), 0, 1)
    (layer,) = export.layers()
    assert torch.equal(layer["layers.0.choice_bias"], router.choice_bias)
    assert layer["layers.0.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(("num_ranks", "order"), [(1, (0, 1)), (2, (0, 1)), (2, (1, 0))])
def test_exports_are_exact_and_two_may_wait_while_training_goes_on(ranks, base, num_ranks, order):
    """The first is the checkpoint that was loaded, bit for bit, a part of it from every rank."""
    gather_and_train = [("gather_weights",), step(RAGGED, ADVANTAGES)]
    exports = [("export_weights", version) for version in order]
    results = ranks.run(base, num_ranks, [*gather_and_train, *gather_and_train, *exports])
    for rank_results in results:
        assert [rank_results[0], rank_results[2]] == [0, 1]
        assert all(manifest for _, manifest in rank_results[4:]), "every rank carries a part"
    weights = {version: exported(results, 4 + n) for n, version in enumerate(order)}
    assert_weights_equal(weights[0], hf_weights(base))
    assert_weights_close(weights[1], expected_update(base, RAGGED, ADVANTAGES)[0])


# ---- checkpoints --------------------------------------------------------------------------------


def save_to(folder, copy=False):
    return ("hold_state", copy), ("write_state", str(folder))


ADAM = {"build_optimizer": partial(torch.optim.AdamW, lr=0.01), "build_lr_scheduler": decay}


@pytest.mark.parametrize(("saving", "loading"), [(1, 1), (2, 2), (2, 1), (1, 2), (2, 4)])
def test_a_checkpoint_has_the_exported_weights_and_any_number_of_ranks_goes_on_from_it(
    ranks, base, tmp_path, saving, loading
):
    """The exported weights, moments, scheduler, random state: as held, not as they were later."""
    saved = tmp_path / "saved"
    first, second = step(RAGGED, ADVANTAGES), step(RAGGED[::-1], ADVANTAGES)
    held, write = save_to(saved, copy=True)
    whole = ranks.run(base, saving, [first, *export(1), held, second, write, *export(2)], **ADAM)
    assert [rank_results[5] for rank_results in whole] == [None] * saving
    assert_weights_equal(load_file(saved / "model.safetensors"), exported(whole, 2))
    of_base, config = (json.loads((each / "config.json").read_text()) for each in (base, saved))
    assert config == of_base | {"dtype": "float32"}
    calls = [("load_state", str(saved)), *export(1), second, *export(2)]
    resumed = ranks.run(base, loading, calls, **ADAM)
    assert_weights_equal(exported(resumed, 2), exported(whole, 2))
    assert resumed[0][3]["policy_version"] == 2
    assert resumed[0][3]["lr"] == whole[0][4]["lr"] == 0.005
    if saving == loading:
        assert_weights_equal(exported(resumed, 5), exported(whole, 7))
    else:
        assert_weights_close(exported(resumed, 5), exported(whole, 7))


def test_a_learning_rate_that_was_changed_takes_part_in_the_schedule(ranks, base, tmp_path):
    first, folder = step(RAGGED, ADVANTAGES), tmp_path / "saved"
    ranks.run(base, 1, [first, *save_to(folder)], **ADAM)
    faster = ADAM | {"build_optimizer": partial(torch.optim.AdamW, lr=0.04)}
    results = ranks.run(base, 1, [("load_state", str(folder)), first, first], **faster)
    assert [result["lr"] for result in results[0][1:]] == [0.02, 0.01]


def eight_bit(parameters, lr=0.01):
    """torchao's optimizer, which otherwise compiles its step, and leaves small tensors whole."""
    optimizer = AdamW8bit(parameters, lr=lr, eps=1e-5)
    compiled = optimizer.step

    def moment(parameter, signed):
        local = parameter.to_local()
        if local.numel() % 256 == 0:
            local = OptimState8bit.zeros(local.shape, signed, 256, local.device)
        else:
            local = torch.zeros_like(local)
        return DTensor.from_local(local, parameter.device_mesh, parameter.placements)

    optimizer._new_buffer = moment

    def step(*args, **kwargs):
        with torch.compiler.set_stance("force_eager"):
            return compiled(*args, **kwargs)

    optimizer.step = step
    return optimizer


def test_a_checkpoint_of_an_8_bit_optimizer_is_loaded_and_its_rate_is_the_configs(
    ranks, base, tmp_path
):
    first, second = step(RAGGED, ADVANTAGES), step(RAGGED[::-1], ADVANTAGES)
    calls = [first, *save_to(tmp_path), second, *export(2)]
    whole = ranks.run(base, 1, calls, build_optimizer=eight_bit)
    saved = FileSystemReader(tmp_path / "state" / "trainer").read_metadata().state_dict_metadata
    assert any("exp_avg" in name for name in saved)
    resumed = [("load_state", str(tmp_path)), second, *export(2)]
    results = ranks.run(base, 1, resumed, build_optimizer=eight_bit)
    assert_weights_equal(exported(results, 3), exported(whole, 5))
    faster = ranks.run(base, 1, resumed[:2], build_optimizer=partial(eight_bit, lr=0.02))
    assert faster[0][1]["lr"] == pytest.approx(0.02)


def test_a_folder_that_cannot_be_written_is_told_by_every_rank(ranks, base, tmp_path):
    (tmp_path / "file").touch()
    results = ranks.run(base, 2, save_to(tmp_path / "file" / "saved"))
    assert all("Not a directory" in rank_results[1] for rank_results in results)


def test_bf16_compute_exports_the_rounded_float32_masters(ranks, base):
    """Rounded once: a master that took a step too small for bf16 comes back as it was."""
    changes = {"dtype": "bf16", "build_optimizer": partial(torch.optim.SGD, lr=1e-9)}
    weights = exported(ranks.step(base, 2, RAGGED, ADVANTAGES, **changes), 2)
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    assert_weights_equal(weights, {n: t.bfloat16() for n, t in hf_weights(base).items()})
