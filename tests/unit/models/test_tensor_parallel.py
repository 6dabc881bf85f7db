"""A plan names every matrix and bias of a layer, once, and nothing else."""

from fnmatch import fnmatch

import pytest
import torch
from equivalence.families import FAMILIES
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from grpo_components.models.tensor_parallel import layer_plan
from grpo_components.settings import TENSOR_PARALLEL_FAMILIES

PLANNED = [name for name in FAMILIES if FAMILIES[name].model_type in TENSOR_PARALLEL_FAMILIES]


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_splits_every_matrix_of_every_layer(name):
    plan = layer_plan(FAMILIES[name].model_type)
    with torch.device("meta"):
        model = FAMILIES[name].build_model()
    for parameter in dict(model.named_parameters()):
        module = parameter.rpartition(".")[0]
        styles = [style for pattern, style in plan.items() if fnmatch(module, pattern)]
        is_split = module.startswith("layers.") and not module.endswith(("sa_norm", "mlp_norm"))
        assert len(styles) == is_split, parameter
    patterns = [pattern for pattern in plan if not pattern.startswith("layers.*.")]
    assert not patterns


@pytest.mark.parametrize("model_type", TENSOR_PARALLEL_FAMILIES)
def test_what_is_summed_over_ranks_has_no_bias(model_type):
    """Split by rows: each rank has part of every sum, and would add the bias again."""
    plan = layer_plan(model_type)
    summed = {name for name, style in plan.items() if isinstance(style, RowwiseParallel)}
    assert summed == {"layers.*.attn.output_proj", "layers.*.mlp.w2"}
    assert all(isinstance(plan[name], ColwiseParallel) for name in plan.keys() - summed)
