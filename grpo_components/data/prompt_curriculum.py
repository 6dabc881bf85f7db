"""The endless stream of a run's prompts, drawn by their success rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_components.data.curriculum import Curriculum
from grpo_components.data.prompt_mix import MixedPart, PromptMix
from grpo_components.data.prompt_stream import Prompt, converted
from grpo_components.errors import ConfigError
from grpo_components.settings import CurriculumSettings


class PromptCurriculum:
    """An endless iterator over (prompt, epoch) pairs, which follows the results of a run.

    `epoch` counts the draws of a prompt. A pair of prompt_index and epoch never occurs twice.
    """

    def __init__(self, dataset: Any, rule: CurriculumSettings, seed: int) -> None:
        mixed = isinstance(dataset, PromptMix)
        parts = list(dataset.parts.values()) if mixed else [MixedPart(dataset, 1.0, 0)]
        places = [[int(part[i]["prompt_index"]) for i in range(len(part))] for part in parts]
        weights = [float(part.weight) for part in parts]
        self.curriculum = Curriculum(list(zip(places, weights, strict=True)), rule, seed)
        """What decides the draws."""
        self._rows = {
            index: (part, row)
            for part, indices in zip(parts, places, strict=True)
            for row, index in enumerate(indices)
        }
        self._num_rows = [len(indices) for indices in places]

    def __iter__(self) -> PromptCurriculum:
        return self

    def __next__(self) -> tuple[Prompt, int]:
        index, epoch = self.curriculum.draw()
        part, row = self._rows[index]
        return converted(part[row]), epoch

    def follow(self, event: Mapping[str, Any]) -> None:
        """Learn from an event of the ledger: a group was generated, or a step was trained."""
        if event["event"] == "finish":
            result = event["prompt"], event["successes"], event["scored"]
            self.curriculum.add_result(*result)
        elif event["event"] == "step":
            self.curriculum.end_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two training steps: draws and success rates."""
        return {"num_rows": self._num_rows, **self.curriculum.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another stream over the same data."""
        if state["num_rows"] != self._num_rows:
            had, has = (" + ".join(map(str, n)) for n in (state["num_rows"], self._num_rows))
            raise ConfigError("dataset", f"it has {has} rows", f"the {had} rows of the checkpoint")
        self.curriculum.load_state_dict(state)
