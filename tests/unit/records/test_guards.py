"""What cannot be trusted ends a run; what no error shows is warned of once, and nothing else is."""

import math
from functools import partial

import numpy as np
import pytest
from lib.rows import read_rows
from lib.trajectories import summary

from grpo_components.errors import DisagreementError, FailedSamplesError, SkippedStepsError
from grpo_components.exchange.event_order import EventOrder
from grpo_components.exchange.ledger import LedgerEntry
from grpo_components.objective.aggregation import SequenceMean, TokenMean
from grpo_components.records.guards import FailedSamples, RunWatch, SkippedSteps, check_agreement
from grpo_components.settings import MAX_GENERATOR_KL, TRUNCATION, GeneratorSettings, Settings


@pytest.fixture
def notes():
    return []


@pytest.fixture
def new_watch(notes, tmp_path):
    return partial(RunWatch, notes.append, tmp_path, averages_tokens=True, ends="7 (<end>)")


@pytest.fixture
def watch(new_watch):
    return new_watch()


# ---- the logprobs of trainers and generators ----------------------------------------------------


def default_bound(dtype, **sampler):
    sampler |= {"max_response_tokens": 4, "temperature": 1.0, "allow_biased_sampling": True}
    return Settings.model_construct(
        dtype=dtype, generator=GeneratorSettings(**sampler)
    ).default_bound


def measured(kl, tokens=256.0):
    return {"mismatch/fresh_kl": kl, "mismatch/fresh_tokens": tokens}


@pytest.mark.parametrize(
    ("bound", "passes", "ends", "facts"),
    [
        (0.25, (0.25,), (0.2501,), ("0.25 over 256 tokens", "max_generator_kl is 0.25")),
        # One token's k3 of 1.5 may be rounding in bf16; 2.9 on each of eight is not.
        (0.1, (1.5, 1.0), (2.9, 8.0), ("2.9 over 8 tokens", "max_generator_kl is 0.1", "0.2")),
        (0.1, (0.1, 16.0), (0.11, 16.0), ("0.11 over 16 tokens",)),
        (1e-4, (math.nan, math.nan), (1.0,), ()),
        (1e-4, (math.nan, 0.0), (1.0,), ()),
    ],
)
def test_a_kl_above_the_bound_ends_the_run_with_both_numbers(bound, passes, ends, facts):
    """Few tokens raise the bound but do not remove it; a step without fresh ones passes."""
    check_agreement(bound, 1, measured(*passes))
    check_agreement(bound, 1, {})  # the metrics of a stand-in trainer
    with pytest.raises(DisagreementError) as ended:
        check_agreement(bound, 7, measured(*ends))
    assert all(fact in str(ended.value) for fact in ("step 7", *facts))


@pytest.mark.parametrize("dtype", MAX_GENERATOR_KL)
@pytest.mark.parametrize("kl", [5.8, 4.6, 3.7, 2.9])
def test_every_wrong_model_that_was_tried_is_over_the_default(dtype, kl):
    with pytest.raises(DisagreementError):
        check_agreement(default_bound(dtype), 1, measured(kl))


def test_a_truncating_sampler_has_no_default():
    for name in TRUNCATION:
        assert default_bound("fp32", **{name: 0.5 if name != "top_k" else 5}) is None
    assert default_bound("bf16", top_k=-1) == MAX_GENERATOR_KL["bf16"]
    check_agreement(None, 1, measured(5.8))


# ---- failed samples -----------------------------------------------------------------------------


def entry(number):
    prompt = {"prompt_index": number, "prompt_text": f"question {number}", "answer": "1"}
    return LedgerEntry(100 + number, prompt, 2, 0, 0, 0)


def sampled(*errors, scored=2):
    return summary([math.nan] * len(errors) + [0.5] * scored, errors=list(errors))


def answers(*errors):
    return [
        {"prompt_index": i, "prompt_text": f"held out {i}", "reward": 1.0, "error": error}
        for i, error in enumerate(errors)
    ]


@pytest.fixture
def new_failures(tmp_path, notes, path):
    path.parent.mkdir()

    def new(share, groups_per_step):
        sizes = {"groups_per_step": groups_per_step, "group_size": 4}
        cfg = Settings.model_construct(output_dir=str(tmp_path), max_failed_samples=share, **sizes)
        return FailedSamples(cfg, EventOrder(1), notes.append)

    return new


@pytest.fixture
def failures(new_failures):
    return new_failures(share=0.5, groups_per_step=3)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "logs/failed_samples.jsonl"


def test_without_failures_nothing_is_written(failures, tmp_path, notes):
    assert failures.count_group(entry(3), sampled()) is False
    assert len(failures.count_evaluation(4, answers(None, None))) == 2
    assert failures.take_count() == 0 and not notes and list(tmp_path.glob("logs/*")) == []


def test_each_failure_is_written_with_its_prompt_and_counted_until_the_step(failures, path, notes):
    assert failures.count_group(entry(3), sampled("a", "b", "a")) is False
    scored = failures.count_evaluation(4, answers(None, "c\x1b[2J", None))
    assert [result["prompt_index"] for result in scored] == [0, 2]
    group, evaluation = read_rows(path)
    assert group == {
        **{"attempt": 1, "group_id": 103, "epoch": 2, "prompt_index": 3},
        **{"prompt": "question 3", "errors": {"a": 2, "b": 1}},
    }
    assert (evaluation["evaluation"], evaluation["prompt"]) == (4, "held out 1")
    assert "\x1b" not in path.read_text()
    (note,) = notes
    assert "samples failed in group 103: a" in note and str(path) in note
    assert (failures.take_count(), failures.take_count()) == (4, 0)
    assert failures.count_group(entry(3), sampled("a", "b", scored=0)) is True, "all failed"


def test_a_traceback_goes_to_the_file_and_its_first_line_to_the_user(failures, path, notes):
    error = "reward mood: KeyError (/here/my_rewards.py:12): 'x'"
    trace = 'Traceback (most recent call last):\n  File "/here/my_rewards.py", line 12, in __call__'
    failures.count_group(entry(3), sampled(f"{error}\n{trace}", "b", f"{error}\n{trace}"))
    (record,) = read_rows(path)
    assert record["errors"] == {error: 2, "b": 1}
    assert record["tracebacks"] == {error: trace}
    failures.take_count()
    failures.count_group(entry(3), sampled(f"{error}\n{trace}"))
    assert error in notes[1] and "Traceback" not in notes[1]


def test_too_many_between_two_steps_end_the_run_with_the_last_error_and_the_file(failures, path):
    for _ in range(3):  # the counts start anew at every step
        failures.count_group(entry(1), sampled("a", "b", "c", "d", "e"))
        assert failures.take_count() == 5
    failures.count_group(entry(1), sampled("a", "b", "c", "d", "e"))
    with pytest.raises(FailedSamplesError) as ended:
        failures.count_group(entry(7), sampled("x" * 5000))
    text = str(ended.value)
    assert text.startswith("max_failed_samples: 0.5 given, but 6 of 10 samples ")
    assert "prompt 7: xxx" in text and text.endswith(str(path)) and len(text) < 1000
    assert read_rows(path)[-1]["errors"] == {"x" * 5000: 1}, "the record of the last one is kept"


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_share_is_of_all_samples_that_ended_since_the_step_and_at_least_of_a_batch(
    share, new_failures
):
    failures = new_failures(share, groups_per_step=2)
    for _ in range(50):  # a step that takes many groups, as where dynamic sampling filters
        failures.count_group(entry(1), sampled(scored=7))
        failures.count_evaluation(1, answers(*[None] * 7))
        if share:  # below each share but 0
            failures.count_group(entry(1), sampled("a"))
    failures.take_count()
    for _ in range(math.ceil(share * 8) - 1 if share else 0):
        failures.count_group(entry(1), sampled("a", scored=0))
    with pytest.raises(FailedSamplesError):
        failures.count_group(entry(1), sampled("a", scored=0))


def test_an_evaluation_without_any_score_ends_the_run(failures):
    with pytest.raises(FailedSamplesError, match=r"step 0 .*timed out"):
        failures.count_evaluation(0, answers("timed out", "crashed"))


# ---- warnings -----------------------------------------------------------------------------------


def seeded(group_id, *seeds):
    return summary([], group_id=group_id, seeds=list(seeds))


def test_a_seed_of_two_samples_is_warned_of_once_and_one_of_a_group_made_again_is_not(
    watch, new_watch, notes
):
    for group in (seeded(0, 1, 2), seeded(0, 1, 2), seeded(1, 3, 4), seeded(2)):
        watch.count_group(group)  # the second: its generator was lost; the last: recorded
    assert notes == []
    for number in (3, 4):
        watch.count_group(seeded(number, 5, 2))
    (line,) = notes
    assert line.startswith("warning: groups 0 and 3 have samples of the same seed (2)")
    new_watch().count_group(seeded(7, 1, 1))
    assert len(notes) == 2 and "groups 7 and 7" in notes[1]


def losses(aggregation, counts=(3, 1, 9), seed=0):
    """Metrics as a trainer measures them: a sum weighted by the aggregation, and token means."""
    numbers, counts = np.random.default_rng(seed), np.array(counts)
    tokens = numbers.normal(0, 2, counts.sum()).astype(np.float32)
    weights = np.repeat(aggregation(counts), counts).astype(np.float32)
    return {"loss/total": float(weights @ tokens), "loss/policy": float(tokens.mean())}


@pytest.mark.parametrize("seed", range(20))
def test_rounding_and_what_a_run_does_not_measure_are_no_imbalance(watch, notes, seed):
    metrics = losses(TokenMean(), counts=(300, 17, 64), seed=seed)
    watch.check_step(1, metrics)
    watch.check_step(2, metrics | {"loss/penalty": math.nan, "ratio/max": 1.5})
    watch.check_step(3, metrics | {"loss/total": metrics["loss/total"] + 1, "loss/penalty": 1.0})
    watch.check_step(4, metrics | {"loss/total": math.nan})
    watch.check_step(5, metrics | {"loss/ptx": 0.5, "loss/total": 9.0})
    watch.check_step(6, {})
    assert notes == []


def test_tokens_that_do_not_weigh_the_same_are_warned_of_with_the_step(
    watch, new_watch, notes, tmp_path
):
    new_watch(averages_tokens=False).check_step(1, losses(SequenceMean()))
    assert notes == [], "another aggregation weighs tokens as it likes"
    watch.check_step(4, losses(SequenceMean()))
    watch.check_step(5, losses(SequenceMean()))
    assert len(notes) == 1 and notes[0].startswith("warning: step 4: loss/total is ")
    assert read_rows(tmp_path / "warnings.jsonl") == [{"kind": "loss", "warning": notes[0]}]
    new_watch()  # of a resumed run, which may be repaired
    assert not [*tmp_path.iterdir()]


def test_a_jump_of_the_mismatch_is_warned_of_and_growth_or_few_steps_are_not(
    watch, new_watch, notes
):
    young = new_watch()
    for step in (1, 2, 3):
        young.check_step(step, {"mismatch/generator_kl": 10.0**step})
    for step, kl in enumerate((1e-13, 1e-4, 4e-4, 6e-3, 0.05, 0.09, 0.1, float("nan")), 1):
        watch.check_step(step, {"mismatch/generator_kl": kl})
    assert notes == []
    watch.check_step(10, {"mismatch/generator_kl": 2.0})
    (line,) = notes
    assert line.startswith(
        "warning: step 10: mismatch/generator_kl is 2, the median of the 7 steps"
    )


def test_a_run_whose_responses_are_all_cut_off_says_what_would_have_ended_them(watch, notes):
    watch.check_step(1, {"rollout/cut_off_fraction": 0.99})
    assert not notes
    for step in (2, 3):
        watch.check_step(step, {"rollout/cut_off_fraction": 1.0})
    assert len(notes) == 1 and "7 (<end>)" in notes[0]


def test_a_run_whose_responses_ended_before_has_a_policy_that_collapsed(watch, notes):
    for step, share in enumerate((0.25, 0.98, 1.0, 1.0), 1):
        watch.check_step(step, {"rollout/cut_off_fraction": share})
    (line,) = notes
    assert line.startswith("since step 3: all responses were cut off at ")
    assert "before, up to 75% of a step's ended" in line and "collapsed" in line
    assert "<end>" not in line


# ---- skipped steps ------------------------------------------------------------------------------


def test_only_skipped_steps_in_a_row_end_the_run_and_the_error_names_them(notes):
    skipped_steps = SkippedSteps(2, notes.append)
    assert skipped_steps.summary() == ""
    for step, trained in enumerate([False, True, False, True], start=1):
        skipped_steps.record(step, "" if trained else f"reason {step}")
    skipped_steps.record(5, "reason 5")
    with pytest.raises(SkippedStepsError, match=r"^max_skipped_steps: 2 given.* 5 to 6 .*reason 6"):
        skipped_steps.record(6, "reason 6")
    assert [note.split()[1] for note in notes] == ["1", "3", "5", "6"]
    assert "reason 1" in notes[0]
    assert skipped_steps.summary() == "4, the first was step 1"
