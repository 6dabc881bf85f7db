"""Predict a run with other settings from one finished run, in virtual time, and advise a split."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from grpo_components.plain_text import one_line
from grpo_components.twin.advice import Split, advise
from grpo_components.twin.fit import Recorded, fit
from grpo_components.twin.setup import Setup, changed, key_of
from grpo_components.twin.simulation import WARM_UP_STEPS, Prediction, simulate

_SPLITS_SHOWN = 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the twin: `python -m grpo_components.twin OUTPUT_DIR [key=value ...] [--gpus N]`."""
    parser = argparse.ArgumentParser(prog="python -m grpo_components.twin", description=__doc__)
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
            raise ValueError(
                f"num_steps: {setup.num_steps} given; allowed: {2 * WARM_UP_STEPS} or more"
            )
        predict = partial(_predict, run, options.seed)
        lines = [*_fitted(run), "", *_compared(run, predict(run.setup), setup, predict(setup))]
        if options.gpus is not None:
            lines += ["", *_advice(setup, options.gpus, advise(setup, options.gpus, predict))]
    except (OSError, ValueError) as error:
        sys.stderr.write(f"no prediction from {one_line(str(folder))}: {one_line(str(error))}\n")
        return 2
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _predict(run: Recorded, seed: int, setup: Setup) -> Prediction:
    lengths = run.lengths(setup, seed)
    return simulate(setup, run.times, lengths, seed=seed, filtered=run.filtered)


def _fitted(run: Recorded) -> list[str]:
    times, step = run.times, run.times.engine_step
    lengths = [tokens for group in run.groups for tokens in group]
    mean, longest = statistics.fmean(lengths), max(lengths)
    kind = f"CPU seconds, {run.setup.cores:g} cores shared" if _on_cpu(run.setup) else "seconds"
    return [
        f"fitted from {run.setup.num_steps} steps ({kind}), "
        f"x {run.step_s / run.uncalibrated_s:.2f} to meet the run's own step time:",
        f"  engine step   {_ms(step.per_step)} + {_ms(step.per_sequence)} a sequence"
        f" + {_ms(step.per_prompt)} a prompt",
        f"  response      {mean:.1f} tokens on average, {longest} at most",
        f"  training step {_ms(times.update_s)} + {1e6 * times.train_s_per_token:.1f} us a token",
        f"  weights       gather {_ms(times.gather_s)}, swap {_ms(times.load_s)}",
        f"  driver        {_ms(times.call_s)} a call",
    ]


def _compared(run: Recorded, own: Prediction, setup: Setup, other: Prediction) -> list[str]:
    changes = [
        f"{key_of(name)}={value}"
        for name, value in vars(setup).items()
        if value != getattr(run.setup, name)
    ]
    rows = [
        ("", "recorded", "its twin", *(["changed"] if changes else [])),
        ("seconds a step", f"{run.step_s:.3f}", *_both(own, other, lambda p: f"{p.step_s:.3f}")),
        ("samples per second", "", *_both(own, other, lambda p: f"{p.samples_per_s:.1f}")),
        (
            "staleness, mean",
            f"{run.staleness_mean:.2f}",
            *_both(own, other, lambda p: f"{p.staleness_mean:.2f}"),
        ),
        (
            "staleness, max",
            f"{run.staleness_max}",
            *_both(own, other, lambda p: f"{p.staleness_max}"),
        ),
        (
            "groups dropped as stale",
            f"{run.dropped_stale}",
            *_both(own, other, lambda p: f"{p.dropped['stale']}"),
        ),
    ]
    rows += [
        (f"idle: {name}", "", *_both(own, other, lambda p, name=name: _share(p, name)))
        for name in dict.fromkeys([*own.idle, *other.idle])
    ]
    width = 4 if changes else 3
    lines = [f"{row[0]:24}" + "".join(f"{cell:>12}" for cell in row[1:width]) for row in rows]
    return [*lines, *([f"changed: {' '.join(changes)}"] if changes else [])]


def _both(own: Prediction, other: Prediction, text: Callable[[Prediction], str]) -> tuple[str, str]:
    return text(own), text(other)


def _share(prediction: Prediction, family: str) -> str:
    return f"{prediction.idle[family]:.0%}" if family in prediction.idle else "none"


def _advice(setup: Setup, gpus: int, tried: dict[Split, Prediction]) -> list[str]:
    lines = [f"{gpus} GPUs, one for each role, each as fast as the recorded run's:"]
    lines.append(
        f"{'generators : trainers : references':36}{'s a step':>10}{'samples/s':>11}"
        f"{'staleness':>11}{'idle: generators, trainers':>29}"
    )
    for split, found in list(tried.items())[:_SPLITS_SHOWN]:
        shares = f"{_share(found, 'generators')}, {_share(found, 'trainers')}"
        lines.append(
            f"{' : '.join(map(str, split)):36}{found.step_s:10.3f}{found.samples_per_s:11.1f}"
            f"{found.staleness_mean:11.2f}{shares:>29}"
        )
    generators, trainers, references = next(iter(tried))
    keys = f"num_generators={generators} num_trainers={trainers}"
    keys += f" num_references={references}" if setup.num_references else ""
    return [*lines, f"best of {len(tried)} splits tried: {keys}"]


def _on_cpu(setup: Setup) -> bool:
    return setup.device == "cpu"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"


if __name__ == "__main__":
    sys.exit(main())
