"""Records what the routers of a mixture of experts computed in a forward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from grpo_components.errors import fail


class RouterRecorder:
    """Keeps the routers' logits of a forward pass that runs inside `with recorder:`.

    A layer that is computed again in the backward pass is not recorded again.
    """

    def __init__(self, model: nn.Module) -> None:
        self.logits: list[Tensor] = []
        """Logits [N, E] of the E experts for each of a column's N tokens, one entry per layer."""
        self._active = False
        check_has_routers(model)
        config: Any = model.config
        self.experts_per_token: int = config.num_experts_per_tok
        """Number of experts that compute each token."""
        router, self._index = _recorded_class(model)
        for module in model.modules():
            if isinstance(module, router):
                module.register_forward_hook(self._record)

    def __enter__(self) -> None:
        """Forget the last forward pass and record the next one."""
        self.logits, self._active = [], True

    def __exit__(self, *_: object) -> None:
        """Stop recording."""
        self._active = False

    def _record(self, module: nn.Module, given: Any, output: Any) -> None:
        if self._active:
            self.logits.append(output[self._index])


def check_has_routers(model: nn.Module) -> None:
    """Check that transformers has a load-balancing loss for a model."""
    config = getattr(model, "config", None)
    if not hasattr(config, "router_aux_loss_coef") or _recorded_class(model)[0] is None:
        problem = f"a number above 0 given, and {type(model).__name__} has no load-balancing loss"
        allowed = "0, or a mixture of experts with `router_aux_loss_coef` in its config.json"
        fail("loss.load_balancing_coeff", problem, allowed)


def _recorded_class(model: nn.Module) -> tuple[Any, int]:
    """Return the class of a model's routers, and the place of the logits in their output."""
    for module in model.modules():
        found = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if found is not None:
            return found.target_class, found.index
    return None, 0
