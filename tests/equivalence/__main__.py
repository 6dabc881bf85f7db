"""The equivalence ladder: runs pairs of computations that must agree and tabulates their gaps."""

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

from equivalence import (
    agent_rungs,
    engine_rungs,
    family_rungs,
    lora_rungs,
    policy_rungs,
    rungs,
    torchrl_rungs,
)
from equivalence.families import FAMILIES
from equivalence.hf_families import HF_FAMILIES
from equivalence.resume import (
    resumed_is_uninterrupted,
    resumed_is_uninterrupted_by_transformers,
)
from equivalence.rungs import Bench
from grpo_components.quiet import quiet_libraries

DEFAULT_OUTPUT = Path("docs/equivalence.md")
COMMAND = "python -m equivalence"


@dataclass(frozen=True)
class Rung:
    """Two computations that must give the same result."""

    name: str
    compared: str
    """What is compared, and the unit of the difference."""
    tolerance: float
    """Largest difference at which the rung holds; 0 means bit-identical."""
    measure: Callable[[Bench], float]
    """Runs both computations and returns their difference."""


@dataclass(frozen=True)
class Result:
    """The difference that was measured for a rung."""

    rung: Rung
    difference: float

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance; False for NaN."""
        return self.difference <= self.rung.tolerance


RUNGS = (
    Rung(
        "asynchronous at `max_staleness: 0` = plain synchronous loop",
        "`tune run` with 4 groups in flight on Ray, and a plain loop over Generator and Trainer: "
        "hash of every batch, and the weights after 3 steps",
        0.0,
        rungs.recipe_is_plain_loop,
    ),
    Rung(
        "two runs at `max_staleness: 0` are identical",
        "`tune run` with whole pushes and with `push: delta`: hash of every batch, and the weights "
        "after 3 steps",
        0.0,
        rungs.synchronous_runs_are_identical,
    ),
    Rung(
        "resumed = uninterrupted, at `max_staleness: 0`",
        "`tune run` killed with SIGKILL after its first checkpoint and resumed, and one without "
        "interruption: hash of every batch, and the weights after 3 steps; the audit passes over "
        "both attempts",
        0.0,
        resumed_is_uninterrupted,
    ),
    Rung(
        "resumed = uninterrupted, policy of transformers",
        "as the rung before, with the tiny policy as a model of transformers",
        0.0,
        resumed_is_uninterrupted_by_transformers,
    ),
    Rung(
        "micro-batched = whole batch",
        "weights after one SGD step, relative to the largest weight change of that step; for token "
        "mean, sequence mean, and constant length with an off-policy correction",
        1e-5,
        rungs.micro_batched_is_whole_batch,
    ),
    Rung(
        "chunked = full logits",
        "logprobs of every response token in nats, and gradients relative to the largest gradient; "
        "chunks of 1, 7 and all tokens",
        5e-5,
        rungs.chunked_is_full_logits,
    ),
    Rung(
        "shared prompts = one row per response",
        "logprobs, loss and gradient, relative to the largest, of "
        + ", ".join(FAMILIES)
        + ": groups "
        "of 1, 2 and 5, masked tokens, two temperatures; against torchtune's decoder one by one",
        1e-5,
        family_rungs.shared_prompts_are_one_row_per_response,
    ),
    Rung(
        "shared prompts = one row per response, policies of transformers",
        "as the rung before, of "
        + ", ".join(HF_FAMILIES)
        + "; against transformers' eager attention; sliding windows of 8 tokens, capped scores, "
        "attention sinks, experts",
        1e-5,
        family_rungs.shared_prompts_are_rows_of_transformers,
    ),
    Rung(
        "transformers policy = torchtune policy",
        "the tiny policy as a model of transformers and as torchtune's decoder: logprobs of every "
        "response token in nats, and the weights after one SGD step, relative to the largest "
        "weight change of that step",
        1e-5,
        policy_rungs.transformers_is_torchtune,
    ),
    Rung(
        "torchrl's `GRPOLoss` = our loss",
        "loss, and gradient relative to the largest, in float64: the tiny policy on ragged "
        "responses with environment tokens, as a padded batch of torchrl's containers with both of "
        "its masks; two pairs of clip bounds; `token_mean` = `TokenMean`, `prompt_mean` = "
        "`SequenceMean`",
        1e-6,
        torchrl_rungs.torchrl_loss_is_ours,
    ),
    Rung(
        "FSDP on 2 ranks = 1 rank",
        "weights after one SGD step, relative to the largest weight change of that step; for the "
        "objectives of the rung of micro-batches",
        1e-5,
        rungs.two_ranks_are_one,
    ),
    Rung(
        "generator logprobs = trainer logprobs",
        "every sampled token, in nats, float32; with the base weights at temperature 1, and with "
        "weights pulled after a step at temperature 0.7",
        1e-4,
        rungs.generator_is_trainer,
    ),
    Rung(
        "engine that pulled weights = freshly loaded engine",
        "sampled tokens and their logprobs in nats; tied and untied embeddings, cached prefixes",
        0.0,
        engine_rungs.pulled_engine_is_fresh_engine,
    ),
    Rung(
        "engine that pulled weights under load = freshly loaded engine",
        "sampled tokens and their logprobs in nats, for requests made after the swap while earlier "
        "requests with the same prompts keep running and keep their KV; prompts of 151 tokens (the "
        "prefix cache has blocks of 32), tied and untied embeddings",
        1e-5,
        engine_rungs.engine_pulled_under_load_is_fresh_engine,
    ),
    Rung(
        "generator with 2 tensor-parallel workers = 1 worker",
        "sampled tokens, their versions, and their logprobs in nats, of requests that run while "
        "the weights are swapped, and of requests made after the swap",
        1e-4,
        engine_rungs.two_workers_are_one,
    ),
    Rung(
        "reloaded Hugging Face export = exported weights",
        "every tensor of " + ", ".join(FAMILIES) + ": a checkpoint written by "
        "Hugging Face and the export of a trainer that loaded it; the weights after a step, pushed "
        "and saved, and the export of a trainer that loaded the saved ones; Qwen2 also with 2 "
        "trainer ranks: FSDP, tensor parallel",
        0.0,
        family_rungs.reloaded_is_exported,
    ),
    Rung(
        "generator logprobs = trainer logprobs, every family",
        "every sampled token, in nats, float32; a random model of each family is trained for one "
        "step, pushed and saved; an engine pulls the weights under load and samples from them, and "
        "a trainer that loaded the saved ones computes the logprobs; Qwen2 also with 2 trainer "
        "ranks: FSDP, tensor parallel",
        1e-4,
        family_rungs.every_family_samples_from_what_it_trained,
    ),
    Rung(
        "reloaded = exported, policies of transformers",
        "as the rung of torchtune's families, of "
        + ", ".join(HF_FAMILIES)
        + "; Qwen3 and Qwen3-MoE also with 2 trainer ranks: tensor parallel, FSDP",
        0.0,
        family_rungs.reloaded_is_exported_by_transformers,
    ),
    Rung(
        "generator logprobs = trainer logprobs, policies of transformers",
        "as the rung of torchtune's families, for the same policies; each one's figure is in "
        "docs/models.md",
        1e-4,
        family_rungs.every_policy_of_transformers_samples_from_what_it_trained,
    ),
    Rung(
        "LoRA: adapter pulled under load = merged weights",
        "every sampled token's logprob in nats, float32, of "
        + ", ".join(name for name, _, _ in lora_rungs.ADAPTED)
        + ": an engine that pulled a trained adapter while requests ran, a fresh engine with the "
        "merged checkpoint, and a trainer that loaded the checkpoint; Qwen3 with 2 trainer ranks",
        1e-4,
        lora_rungs.adapter_is_merged_weights,
    ),
    Rung(
        "LoRA: generator logprobs = trainer logprobs",
        "every sampled token, in nats, float32; with a new adapter at temperature 1, and with one "
        "pulled after a step at temperature 0.7",
        1e-4,
        lora_rungs.generator_is_adapted_trainer,
    ),
    Rung(
        "agent's session of one call = plain rollout",
        "an agent with OpenAI's client, and the plain environment, on the same prompts: tokens, "
        "masks, versions, rewards, logprobs, and the weights after one SGD step",
        0.0,
        agent_rungs.session_is_plain_rollout,
    ),
    Rung(
        "agent's session of two calls, the second of which continues the first = plain rollout",
        "tokens, masks, versions and rewards are the same; logprobs in nats, as the second call "
        "reads what the first sampled",
        1e-5,
        agent_rungs.continued_session_is_plain_rollout,
    ),
)
"""The ladder, in the order of the table."""


def measure(ladder: Sequence[Rung], bench: Bench, console: Console) -> list[Result]:
    """Measure every rung and print the outcome of each."""
    results = []
    for rung in ladder:
        result = Result(rung, rung.measure(bench))
        results.append(result)
        verdict = "holds" if result.holds else "DOES NOT HOLD"
        console.print(f"{verdict}: {rung.name} ({_number(result.difference)})")
    return results


def page(results: Sequence[Result]) -> str:
    """Return the text of the page `docs/equivalence.md`."""
    rows = [
        f"| {number} | {result.rung.name} | {result.rung.compared} "
        f"| {_number(result.rung.tolerance)} | {_number(result.difference)} "
        f"| {'yes' if result.holds else '**NO**'} |\n"
        for number, result in enumerate(results, start=1)
    ]
    return (
        "# Equivalence ladder\n\n"
        "Generated by `make equivalence`; do not edit.\n\n"
        "Each rung runs the real classes two ways on a CPU, in float32, and measures the largest\n"
        "difference. Tolerance 0 means bit-identical. If a rung does not hold, `make test` fails,\n"
        "or `make nightly` for the few that take long.\n"
        "[This table](architecture.md#the-tests-engine-and-a-gpus) lists how the engine on a GPU "
        "differs.\n\n"
        "| | rung | what is compared | tolerance | measured difference | holds |\n"
        "|---|---|---|---|---|---|\n" + "".join(rows)
    )


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def main(arguments: list[str] | None = None, ladder: Sequence[Rung] = RUNGS) -> int:
    """Measure the ladder and write the page."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Measure every rung of the equivalence ladder; write the table."
    )
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--policy", type=Path, help="folder of the tiny policy")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, soft_wrap=True)
    quiet_libraries("WARNING")
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="equivalence-") as scratch:
        try:
            bench = Bench(Path(scratch), options.policy)
        except ValueError as error:  # the tiny policy is not built yet
            console.print(f"{error}\nrun first: python -m grpo_components.examples.tiny_policy")
            return 2
        with contextlib.closing(bench):
            results = measure(ladder, bench, console)
    options.output.write_text(page(results))
    failed = [result.rung.name for result in results if not result.holds]
    for name in failed:
        console.print(f"error: rung does not hold: {name}", style="red")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
