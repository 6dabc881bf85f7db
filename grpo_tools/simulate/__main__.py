"""Predict a run with other settings from one finished run, in virtual time, and advise a split."""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from grpo_components.errors import ConfigError, fail
from grpo_components.plain_text import one_line
from grpo_components.settings import Settings
from grpo_tools.simulate.fit import WARM_UP_STEPS, Lengths, Recorded, changed, fit
from grpo_tools.simulate.simulation import Prediction, simulate

Split = tuple[int, int, int]
"""Number of generators, trainers and references."""
_KEYS: tuple[str, ...] = ("num_generators", "num_trainers", "num_references")
_SPLITS_SHOWN = 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `grpo simulate OUTPUT_DIR [key=value ...] [--gpus N]`; return 2 on an error."""
    parser = argparse.ArgumentParser(
        prog="grpo simulate",
        description=__doc__,
        epilog="example: grpo simulate /tmp/run max_staleness=4 num_generators=2",
    )
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="a run's output_dir")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="other settings, as for the recipe"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="advise how to split N GPUs")
    parser.add_argument("--seed", type=int, default=0, help="seed of what is drawn (default 0)")
    options = parser.parse_intermixed_args(arguments)
    folder = options.output_dir
    try:
        run = fit(folder)
        setup = changed(run.setup, options.overrides)
        if setup.num_steps < 2 * WARM_UP_STEPS:
            fail("num_steps", f"{setup.num_steps} given", f"{2 * WARM_UP_STEPS} or more")
        given, cut = (each.generator.max_response_tokens for each in (setup, run.setup))
        if given > cut and any(cut in group for group in run.groups):
            problem = f"{given} given, and how long the responses cut off at {cut} were is unknown"
            fail("generator.max_response_tokens", problem, f"at most {cut}")

        def predict(setup: Settings) -> Prediction:
            lengths = Lengths(run.groups, setup.generator.max_response_tokens, options.seed)
            return simulate(setup, run.times, lengths, seed=options.seed, filtered=run.filtered)

        predictions = [predict(each) for each in (run.setup, setup)[: 1 + bool(options.overrides)]]
        lines = [*_fitted(run), "", *_compared(run, predictions)]
        if options.overrides:
            lines.append(f"changed: {' '.join(options.overrides)}")
        if options.gpus is not None:
            lines += ["", *_advice(options.gpus, advise(setup, options.gpus, predict))]
    except (OSError, ValueError) as error:
        sys.stderr.write(f"no prediction from {one_line(str(folder))}: {one_line(str(error))}\n")
        return 2
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def advise(
    setup: Settings, gpus: int, predict: Callable[[Settings], Prediction]
) -> dict[Split, Prediction]:
    """Find the split of GPUs over roles with the shortest step; return all tried, best first.

    Each process of a role has a GPU of its own. The search starts at an equal split. It moves GPUs
    from one kind of role to another, at first several at a time, as long as that shortens the step.
    It leaves out splits that other settings do not allow.
    """
    if max(setup.generator.tensor_parallel_size, setup.tensor_parallel_dim) > 1:
        fail("--gpus", f"{gpus} given for roles with tensor parallelism", "a run without it")
    kinds = 3 if setup.num_references else 2
    if gpus < kinds:
        roles = "generators and trainers" if kinds == 2 else "generators, trainers and references"
        fail("--gpus", f"{gpus} given for {roles}", f"{kinds} or more")
    tried: dict[Split, Prediction] = {}

    def step_s(split: Split) -> float:
        if split not in tried:
            pairs = zip(_KEYS, split, strict=True)
            try:
                each = changed(setup, [f"{key}={number}" for key, number in pairs if number])
            except ConfigError:
                return math.inf
            tried[split] = predict(each)
        return tried[split].step_s

    each, references = gpus // kinds, gpus // kinds * (kinds - 2)
    best, stride = (gpus - each - references, each, references), max(1, gpus // 8)
    while stride:
        better = min((best, *_moves(best, stride)), key=step_s)
        if better == best:
            stride //= 2
        best = better
    if not tried:
        fail("--gpus", f"{gpus} given, and other keys refuse the splits tried", "another number")
    return dict(sorted(tried.items(), key=lambda item: item[1].step_s))


def _moves(split: Split, stride: int) -> Iterator[Split]:
    """Yield the splits that differ by `stride` GPUs, moved from one kind of role to another."""
    kinds = [kind for kind, number in enumerate(split) if number]
    for source, target in itertools.permutations(kinds, 2):
        if split[source] > stride:
            moved = list(split)
            moved[source] -= stride
            moved[target] += stride
            yield moved[0], moved[1], moved[2]


def _fitted(run: Recorded) -> list[str]:
    times = run.times
    lengths = [tokens for group in run.groups for tokens in group]
    return [
        f"fitted from {run.setup.num_steps} steps:",
        f"  engine step   {_ms(times.step_s)} + {_ms(times.step_s_per_sequence)} a sequence"
        f" + {_ms(times.step_s_per_prompt)} a prompt",
        f"  response      {statistics.fmean(lengths):.1f} tokens, at most {max(lengths)}",
        f"  training step {_ms(times.update_s)} + {1e6 * times.train_s_per_token:.1f} us a token",
        f"  weights       gather {_ms(times.gather_s)}, swap {_ms(times.load_s)}",
    ]


def _compared(run: Recorded, predictions: Sequence[Prediction]) -> list[str]:
    columns = (run, *predictions)
    rows = [
        ("", "recorded", "simulated", "changed"),
        ("seconds a step", *(f"{each.step_s:.3f}" for each in columns)),
        ("samples per second", "", *(f"{each.samples_per_s:.1f}" for each in predictions)),
        ("staleness, mean", *(f"{each.staleness_mean:.2f}" for each in columns)),
        ("staleness, max", *(f"{each.staleness_max}" for each in columns)),
        ("groups dropped as stale", *(f"{each.dropped['stale']}" for each in columns)),
    ]
    for family in dict.fromkeys(family for each in predictions for family in each.idle):
        rows.append((f"idle: {family}", "", *(_idle(each, family) for each in predictions)))
    width = 1 + len(columns)
    return [f"{row[0]:24}" + "".join(f"{cell:>12}" for cell in row[1:width]) for row in rows]


def _idle(prediction: Prediction, family: str) -> str:
    return f"{prediction.idle[family]:.0%}" if family in prediction.idle else "none"


def _advice(gpus: int, tried: dict[Split, Prediction]) -> Iterator[str]:
    yield f"{gpus} GPUs, one for each role, each as fast as the recorded run's:"
    yield (
        f"{'generators : trainers : references':36}{'s a step':>10}{'samples/s':>11}"
        f"{'staleness':>11}{'idle: generators, trainers':>29}"
    )
    for split, found in itertools.islice(tried.items(), _SPLITS_SHOWN):
        shares = f"{_idle(found, 'generators')}, {_idle(found, 'trainers')}"
        yield (
            f"{' : '.join(map(str, split)):36}{found.step_s:10.3f}{found.samples_per_s:11.1f}"
            f"{found.staleness_mean:11.2f}{shares:>29}"
        )
    best = zip(_KEYS, next(iter(tried)), strict=True)
    keys = " ".join(f"{key}={number}" for key, number in best if number)
    yield f"best of {len(tried)} splits tried: {keys}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
