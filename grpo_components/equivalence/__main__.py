"""The equivalence ladder: what must come out the same is run both ways and compared in a table."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from grpo_components.equivalence import engine_rungs as engine_rungs
from grpo_components.equivalence import family_rungs as family_rungs
from grpo_components.equivalence import rungs as rungs
from grpo_components.equivalence.families import FAMILIES
from grpo_components.equivalence.resume import resumed_is_uninterrupted
from grpo_components.equivalence.rungs import Bench
from grpo_components.quiet import quiet_libraries

DEFAULT_OUTPUT = Path("docs/equivalence.md")
COMMAND = "python -m grpo_components.equivalence"


@dataclass(frozen=True)
class Rung:
    """Two ways to one result."""

    name: str
    compared: str
    """What is run both ways, and in which unit the difference is."""
    tolerance: float
    """Largest difference at which the rung holds; 0 is bit for bit."""
    measure: Callable[[Bench], float]
    """Runs both ways; returns the difference."""


@dataclass(frozen=True)
class Result:
    """What a rung measured."""

    rung: Rung
    difference: float

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance; NaN never is."""
        return self.difference <= self.rung.tolerance


RUNGS = (
    Rung(
        "asynchronous at `max_staleness: 0` = plain synchronous loop",
        "`tune run` with 4 groups in flight on Ray, and a loop that calls Generator and Trainer in "
        "turn: hash of every batch, and the weights after 3 steps",
        0.0,
        rungs.recipe_is_plain_loop,
    ),
    Rung(
        "two runs at `max_staleness: 0` are identical",
        "`tune run` twice: hash of every batch, and the weights after 3 steps",
        0.0,
        rungs.synchronous_runs_are_identical,
    ),
    Rung(
        "resumed = uninterrupted, at `max_staleness: 0`",
        "`tune run` killed with SIGKILL after its first checkpoint and resumed, and one left "
        "alone: hash of every batch, and the weights after 3 steps; the audit holds over both "
        "attempts",
        0.0,
        resumed_is_uninterrupted,
    ),
    Rung(
        "micro-batched = whole batch",
        "weights after one step of SGD, relative to its largest change of a weight; token mean, "
        "sequence mean, and constant length with an off-policy correction",
        1e-5,
        rungs.micro_batched_is_whole_batch,
    ),
    Rung(
        "chunked = full logits",
        "logprobs of every response token in nats, and gradients relative to the largest one; "
        "chunks of 1, 7 and all tokens",
        5e-5,
        rungs.chunked_is_full_logits,
    ),
    Rung(
        "FSDP on 2 ranks = 1 rank",
        "weights after one step of SGD, relative to its largest change of a weight; the objectives "
        "of the micro-batched rung",
        1e-5,
        rungs.two_ranks_are_one,
    ),
    Rung(
        "generator logprobs = trainer logprobs",
        "nats, every sampled token, float32; on the base weights at temperature 1, and on weights "
        "that the generator pulled after a step, at 0.7",
        1e-4,
        rungs.generator_is_trainer,
    ),
    Rung(
        "engine that pulled weights = freshly loaded engine",
        "sampled tokens, and their logprobs in nats; tied and untied embeddings, cached prefixes",
        0.0,
        engine_rungs.pulled_engine_is_fresh_engine,
    ),
    Rung(
        "engine that pulled weights under load = freshly loaded engine",
        "sampled tokens, and their logprobs in nats, of requests made after the swap while others "
        "with the same prompts ran on over it; prompts of 151 tokens (the prefix cache has blocks "
        "of 128), tied and untied embeddings, running requests keep their KV",
        1e-5,
        engine_rungs.engine_pulled_under_load_is_fresh_engine,
    ),
    Rung(
        "Hugging Face export, reloaded = what was exported",
        "every tensor of " + ", ".join(FAMILIES) + ": Hugging Face's own checkpoint, the "
        "trainer's copy of it, and the export of a trainer that loaded the copy",
        0.0,
        family_rungs.reloaded_is_exported,
    ),
    Rung(
        "generator logprobs = trainer logprobs, every family",
        "nats, every sampled token, float32; a random model of each family of the rung above is "
        "trained for a step and exported, an engine pulls that and samples from it",
        1e-4,
        family_rungs.every_family_samples_from_what_it_trained,
    ),
)
"""The ladder, in the order of the table."""


def measure(ladder: Sequence[Rung], bench: Bench, console: Console) -> list[Result]:
    """Run every rung, and say how each ended.

    Args:
        ladder: rungs.
        bench: what they share.
        console: gets a line per rung.
    """
    results = []
    for rung in ladder:
        result = Result(rung, rung.measure(bench))
        results.append(result)
        verdict = "holds" if result.holds else "DOES NOT HOLD"
        console.print(f"{verdict}: {rung.name} ({_number(result.difference)})")
    return results


def page(results: Sequence[Result]) -> str:
    """The documentation's page about the ladder, in Markdown.

    Args:
        results: of all rungs.
    """
    rows = [
        f"| {number} | {result.rung.name} | {result.rung.compared} "
        f"| {_number(result.rung.tolerance)} | {_number(result.difference)} "
        f"| {'yes' if result.holds else '**NO**'} |\n"
        for number, result in enumerate(results, start=1)
    ]
    return (
        "# Equivalence ladder\n\n"
        f"Written by `make equivalence` (`{COMMAND}`); not by hand.\n\n"
        "Each rung runs the real classes both ways on a CPU, in float32, and measures the largest\n"
        "difference. Tolerance 0 is bit for bit. `make test` fails when a rung does not hold.\n"
        "[One table](architecture.md#the-tests-engine-and-a-gpus) says where a GPU's engine "
        "differs.\n\n"
        "| | rung | what is compared | tolerance | measured difference | holds |\n"
        "|---|---|---|---|---|---|\n" + "".join(rows)
    )


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def main(arguments: list[str] | None = None, ladder: Sequence[Rung] = RUNGS) -> int:
    """Run the command line and return its exit code: 0 where every rung holds, else 1.

    Args:
        arguments: what follows the program's name; by default the command's own.
        ladder: rungs to run.
    """
    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Measure every rung of the equivalence ladder; write the table."
    )
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    options = parser.parse_args(arguments)
    console = Console(stderr=True, soft_wrap=True)
    quiet_libraries("WARNING")
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="equivalence-") as scratch:
        try:
            bench = Bench(Path(scratch))
        except ValueError as error:  # of the config: there is no tiny policy yet
            console.print(f"{error}\nfirst: python -m grpo_components.examples.tiny_policy")
            return 2
        with contextlib.closing(bench):
            results = measure(ladder, bench, console)
    options.output.write_text(page(results))
    broken = [result.rung.name for result in results if not result.holds]
    for name in broken:
        console.print(f"error: this rung does not hold: {name}", style="red")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
