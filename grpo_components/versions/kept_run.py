"""Finds and rebuilds the policy versions that a run has kept, for use by other programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from grpo_components.exchange import policy_versions
from grpo_components.exchange.policy_versions import KeptVersions, VersionId
from grpo_components.exchange.weights import StateDict
from grpo_components.models.lora import LoraOptions, adapter_tensors
from grpo_components.training.checkpoint import save_adapter, save_hf_weights

BASE_VERSION = 0
"""Number of the version that is the base model."""


class KeptRun:
    """The policy versions of a run."""

    def __init__(
        self,
        output_dir: Path,
        base_model_path: Path,
        lora: LoraOptions | None = None,
        begins: Mapping[int, int] | None = None,
    ) -> None:
        self._base, self._lora, self._begins = base_model_path, lora, begins or {}
        self.folder = output_dir / policy_versions.FOLDER
        self.kept = KeptVersions(self.folder, base_model_path)
        self._identities = self.kept.identities()

    def __bool__(self) -> bool:
        return bool(self._identities)

    def newest(self, version: int) -> VersionId:
        """Return the version of this number that the last attempt wrote."""
        found = [each for each in self._identities if each.version == version]
        return found[-1] if found else VersionId(0, version)

    def identity(self, attempt: int, version: int) -> VersionId:
        """Return the version whose weights a generator of an attempt had by a number.

        Up to the version that the attempt begins with, it has those of the attempt before.
        """
        at = attempt
        while VersionId(at, version) not in self._identities:
            if at == 0 or version > self._begins.get(at, -1):
                if version == BASE_VERSION:
                    break
                problem = f"version {version} of attempt {attempt} is not kept"
                raise ValueError(f"{self.folder}: {problem}")
            at -= 1
        return VersionId(at, version)

    def write(self, identity: VersionId, folder: Path) -> None:
        """Write a version as checkpoints have it: a Hugging Face folder, or an adapter."""
        if self._lora is None:
            return save_hf_weights(self._state_dict(identity), self._base, folder)
        if identity.version == BASE_VERSION and identity not in self._identities:
            problem = "version 0 is the base model, with adapters that add nothing"
            raise ValueError(f"{problem}: {self._base}")
        adapter = {name: t.clone() for name, t in self._state_dict(identity).items()}
        save_adapter(adapter, self._lora, self._base, folder)

    def write_merged(self, identity: VersionId, folder: Path) -> None:
        """Write a version as one model in float32; an adapter is merged into the base model."""
        if self._lora is None:
            weights = {name: t.float() for name, t in self._state_dict(identity).items()}
            return save_hf_weights(weights, self._base, folder)
        weights = self.kept.base_model()
        if identity in self._identities:
            merge(weights, self._state_dict(identity), self._lora.scale)
        save_hf_weights(weights, self._base, folder)

    def _state_dict(self, identity: VersionId) -> StateDict:
        if identity.version == BASE_VERSION and identity not in self._identities:
            return self.kept.base_state_dict()
        return self.kept.state_dict(identity)


def merge(weights: StateDict, adapter: StateDict, scale: float) -> None:
    """Add an adapter to a base model, in place."""
    for name, a in adapter_tensors(adapter).items():
        path = name.removesuffix("lora_A.weight")
        if path != name:
            b = adapter[f"{path}lora_B.weight"]
            weights[f"{path.removeprefix('base_model.model.')}weight"] += scale * (
                b.float() @ a.float()
            )
