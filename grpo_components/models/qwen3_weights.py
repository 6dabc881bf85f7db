"""Qwen3's weights: their names in Hugging Face's files, and the checkpointer that reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchtune import training
from torchtune.models.convert_weights import get_mapped_key
from torchtune.models.qwen2._convert_weights import _FROM_HF as _QWEN2_FROM_HF
from torchtune.training import FormattedCheckpointFiles
from torchtune.training.checkpointing._utils import safe_torch_load

from grpo_components.errors import ConfigError
from grpo_components.exchange.weights import StateDict

_HEAD = "lm_head.weight"
_FROM_HF = {
    **{hf: own for hf, own in _QWEN2_FROM_HF.items() if own and not hf.endswith(".bias")},
    "model.layers.{}.self_attn.q_norm.weight": "layers.{}.attn.q_norm.scale",
    "model.layers.{}.self_attn.k_norm.weight": "layers.{}.attn.k_norm.scale",
}
_TO_HF = {own: hf for hf, own in _FROM_HF.items()}


def qwen3_tune_to_hf(state_dict: StateDict) -> StateDict:
    """Rename a decoder's weights to Hugging Face's names."""
    return {get_mapped_key(name, _TO_HF): tensor for name, tensor in state_dict.items()}


class Qwen3Checkpointer:
    """Reads Qwen3's Hugging Face checkpoints, which torchtune's FullModelHFCheckpointer does not.

    Args:
        checkpoint_dir: folder of the base model, with its config.json.
        checkpoint_files: names of the files in it, or torchtune's `filename_format` and
            `max_filename`.
        model_type: QWEN3.
        output_dir: unused, as is `recipe_checkpoint`: the recipe writes its checkpoints itself.
            torchtune's checkpointer requires it, so that every config has it.
        recipe_checkpoint: unused.

    Raises:
        ValueError: another model type is given.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        checkpoint_files: Sequence[str] | Mapping[str, str],
        model_type: str,
        output_dir: str,
        recipe_checkpoint: str | None = None,
    ) -> None:
        if model_type != "QWEN3":
            raise ConfigError("checkpointer.model_type", f"{model_type} given", "QWEN3")
        if isinstance(checkpoint_files, Mapping):
            numbered = FormattedCheckpointFiles.from_dict(dict(checkpoint_files))
            checkpoint_files = numbered.build_checkpoint_filenames()
        self._folder, self._files = Path(checkpoint_dir), list(checkpoint_files)

    def load_checkpoint(self) -> dict[str, StateDict]:
        """Return the weights by torchtune's names, under the key of torchtune's checkpointers.

        Raises:
            ValueError: a file cannot be read, or has a tensor that Qwen3 lacks.
        """
        hf_config = json.loads((self._folder / "config.json").read_text())
        is_tied = bool(hf_config.get("tie_word_embeddings", False))
        weights: StateDict = {}
        for file in sorted(self._files):
            for name, tensor in safe_torch_load(self._folder / file).items():
                if not (is_tied and name == _HEAD):  # a copy of the embedding
                    weights[_own_name(name, self._folder / file)] = tensor
        return {training.MODEL_KEY: weights}


def _own_name(name: str, file: Path) -> str:
    try:
        return get_mapped_key(name, _FROM_HF)
    except Exception as error:  # torchtune raises no narrower one
        problem = f"QWEN3 given, and {file} has {name}"
        raise ConfigError("checkpointer.model_type", problem, "a Qwen3 model") from error
