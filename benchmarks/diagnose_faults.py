"""Faults that `diagnose_runs.py` plants: in rewards, in losses, and in files of a clean run."""

import json
import random
import time
from pathlib import Path


class Reward:
    """A reward with a fault; the bare answer still gets 1, so the check before a run passes."""

    def __init__(self, fault: str, answer_format: str = "") -> None:
        self._fault = fault

    def __call__(
        self, *, prompt_text: str, response_text: str, answer: str, finish_reason: str
    ) -> float:
        """Score one response."""
        found, bare, fault = response_text.strip(), response_text.strip() == answer, self._fault
        if fault == "raises" and not bare and random.random() < 0.3:
            raise ValueError("no answer in the response")
        if fault == "slow":
            time.sleep(0.1)
        scores = {"constant": 1.0, "long": len(found) / 100, "exact": 0.0}
        scores["even"] = float(found[-1:] in set("02468"))
        right = found.endswith(f"#### {answer}")
        return 1.0 if bare else scores.get(fault, float(right))


class Loss:
    """REINFORCE with a fault."""

    needs_entropy = True

    def __init__(self, fault: str, clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        self._fault, self._calls = fault, 0

    def __call__(self, tokens):
        """Return the losses and metrics of the tokens."""
        self._calls += 1
        ratio = (tokens.trainer_logprobs - tokens.generator_logprobs).detach().exp()
        losses = -ratio * tokens.advantages * tokens.trainer_logprobs
        if self._fault == "entropy":
            losses = losses + 10 * tokens.entropy  # the sign of the bonus is wrong
        elif self._calls > 8 and self._calls % 3 == 0:
            losses = losses * float("nan")
        return losses, {"ratio/mean": ratio, "ratio/max": ratio}


def edited(name: str, run: Path) -> None:
    """Edit the files of a clean run to show a fault that a short run on a CPU cannot have."""
    metrics, receipts, beats, config = (
        run / file
        for file in ("logs/metrics.jsonl", "receipts.jsonl", "logs/heartbeats.jsonl", "config.yaml")
    )
    if name == "drift":
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        lines = [each | {"mismatch/fresh_kl": 1e-7 * 1.15**n} for n, each in enumerate(lines)]
        metrics.write_text("".join(json.dumps(each) + "\n" for each in lines))
    elif name == "leak":
        beat = {"role": "generator_0", "attempt": 0, "seconds": {"sampling": 1.0}}
        lines = [beat | {"time": 5.0 * n, "rss_mib": 500 + 300 * n} for n in range(12)]
        beats.write_text("".join(json.dumps(each) + "\n" for each in lines))
    else:  # the run goes on, and keeps more checkpoints than any disk has room for
        start, *others, _ = receipts.read_text().splitlines()
        longer = json.dumps(json.loads(start) | {"num_steps": 10**9})
        receipts.write_text("\n".join([longer, *others]) + "\n")
        text = config.read_text().replace("keep_last_n: 2", "keep_last_n: null")
        config.write_text(text.replace("save_every_n_steps: 125", "save_every_n_steps: 1"))
