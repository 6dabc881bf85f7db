"""Checks after each pull that a generator has the trainers' weights, by hashes and a probe.

The probe is a fixed sequence of tokens. Trainers and engine compute its logprobs with the same
version of the weights. (Logprobs of trained tokens would differ anyway in an asynchronous run,
because older versions sampled them.) The engine must label the probe with that version, and must
have none of its tokens in a cache.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_components.errors import DisagreementError

PROBE_TOKENS = 40
"""Length in tokens of the probe, which an engine gets after each swap of weights: more than a block
of the prefix cache (32 on a CPU, 16 on a GPU), because the cache keeps only whole blocks."""
PROBE_IDS = tuple(7 * number % 53 + 3 for number in range(PROBE_TOKENS))
"""Token ids of the probe; every vocabulary has them. The first is the prompt."""


@dataclass(frozen=True)
class ProbeReading:
    """What an engine computes for the probe, with weights that it has just loaded."""

    logprobs: Sequence[float]
    """Logprobs of `PROBE_IDS` after the first, in nats, as many as fit into the engine's longest
    sequence; empty if any of the tokens is cached."""
    label: int
    """Policy version with which the engine labels a token that it samples now."""
    cached_tokens: int
    """Number of probe tokens whose keys and values the engine read from its prefix cache."""
    layers: Mapping[str, int] | None = None
    """Hash of each layer's weights in the engine; None if the engine transforms the weights."""


LoadedWeights = tuple[int, str, ProbeReading | None]
"""Version and checksum of weights that a generator has loaded, and what its engine computes for the
probe; None without an engine."""
_VERSIONS_KEPT = 64
_NEARER = 4.0
"""Factor that decides whether a generator loaded another version than the one that it names. The
gap of a version is the mean squared difference of the trainers' and the engine's logprobs. It is an
error if the named version's gap exceeds rounding (`_ROUNDING`) and this many times the smallest
gap; if rounding is not small, also this many times the median gap of earlier pulls."""
_ROUNDING = 1e-4
"""Root mean square gap of the probe's logprobs, in nats, that still counts as rounding."""
_LAYERS_NAMED = 4
"""Maximum number of layers of a version that an error names."""


class WeightProbe:
    """Raises an error if a generator's weights are not those of the version that it names."""

    def __init__(self, max_kl: float | None) -> None:
        self._max_kl = max_kl
        self._pushed: dict[int, np.ndarray] = {}
        self._layers: dict[int, Mapping[str, int]] = {}
        self._usual: deque[float] = deque(maxlen=_VERSIONS_KEPT)
        """Mean square gap between trainer's and generator's logprobs in each earlier pull."""

    def pushed(self, version: int, logprobs: Sequence[float]) -> None:
        """Remember the trainers' logprobs of the probe for a pushed version, if there are any."""
        self._pushed.pop(version, None)
        if len(logprobs):
            self._pushed[version] = np.array(logprobs)
        if len(self._pushed) > _VERSIONS_KEPT:
            del self._pushed[min(self._pushed)]

    def forget(self) -> None:
        """Forget all versions: a new attempt uses the same version numbers again."""
        self._pushed.clear()
        self._layers.clear()

    def check(
        self,
        generator: str,
        version: int,
        reading: ProbeReading | None,
        layers: Mapping[str, int] | None = None,
    ) -> None:
        """Check what a generator computed for the probe with the weights that it has loaded.

        `layers` has the hash of each pushed layer; None for float32 on a CPU, which engines repack.
        """
        if layers is not None:
            self._layers[version] = layers
            if len(self._layers) > _VERSIONS_KEPT:
                del self._layers[min(self._layers)]
        if reading is None:
            return
        if reading.label != version:
            raise DisagreementError(
                f"{generator} pulled version {version}, but labels what it samples now with "
                f"version {reading.label}: receipts, staleness and ratios would name other weights "
                "than those that sampled"
            )
        if reading.cached_tokens:
            raise DisagreementError(
                f"{generator} pulled version {version}, but read {reading.cached_tokens} tokens of "
                "a probe from its prefix cache: keys and values of earlier weights are used on"
            )
        if layers is not None and reading.layers is not None and reading.layers != layers:
            raise DisagreementError(
                f"{generator} pulled version {version}, but has other weights than were pushed: "
                f"{self._whose(reading.layers, layers)}. Likely causes: weights that were not "
                "loaded, or only in part, or in the place of others"
            )
        if self._max_kl is None or version not in self._pushed:
            return
        found = np.array(reading.logprobs)
        gaps = {v: each[: len(found)] - found for v, each in self._pushed.items()}
        gap = gaps[version]
        kl, square = float(np.mean(np.expm1(gap) - gap)), float(np.mean(gap**2))
        nearest = min(gaps, key=lambda v: float(np.mean(gaps[v] ** 2)))
        other = float(np.mean(gaps[nearest] ** 2))
        is_other = math.sqrt(square) > _ROUNDING and square > _NEARER * other
        if layers is not None:  # rounding is not small: any version may be the nearest
            unusual = square > _NEARER * float(np.median(self._usual or [math.inf]))
            is_other &= reading.layers is None and unusual
            self._usual.append(square)
        if kl <= self._max_kl and not is_other:
            return
        like = f", and is nearer to version {nearest}" if is_other else ""
        raise DisagreementError(
            f"{generator} pulled version {version}, but computes other logprobs by it than the "
            f"trainers: the KL on a probe of {len(found)} tokens is {kl:.3g}, allowed is "
            f"{self._max_kl:.3g}{like}. Likely causes: weights that were not loaded, or only in "
            "part, or in the place of others; `model` does not match config.json in base_model_path"
        )

    def _whose(self, found: Mapping[str, int], pushed: Mapping[str, int]) -> str:
        """Name the engine's layers that differ from the pushed ones, and each one's version."""
        by_version = defaultdict[int | None, list[str]](list)
        for name in sorted(found.keys() | pushed.keys(), key=lambda name: (len(name), name)):
            if (value := found.get(name)) != pushed.get(name):
                newest_first = sorted(self._layers, reverse=True)
                same = (v for v in newest_first if self._layers[v].get(name) == value)
                by_version[next(same, None)].append(name)
        parts: list[str] = []
        for version, names in by_version.items():
            more = f" and {len(names) - _LAYERS_NAMED} more" if names[_LAYERS_NAMED:] else ""
            whose = "of no version that was pulled" if version is None else f"of version {version}"
            parts.append(f"{', '.join(names[:_LAYERS_NAMED])}{more} ({whose})")
        return "; ".join(parts)
