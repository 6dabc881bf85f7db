"""The way of the weights must be one that devices and placement have; the refusal names both."""

import pytest

from grpo_components.config import role_arguments
from grpo_components.config.transfer_checks import check_transfer

ONE_GPU = {"device": "cuda", "gpus_per_trainer": 0.5, "gpus_per_generator": 0.5}
TURNS = {"device": "cuda", "colocate": True}


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"weights": "nccl"}, r"nccl given with device: cpu.*object_store \| gloo$"),
        ({"weights": "ipc"}, r"ipc given with device: cpu.*object_store \| gloo$"),
        ({"weights": "gloo", "device": "cuda"}, r"gloo given.*object_store \| nccl \| ipc$"),
        ({"weights": "gloo", "train_from": "groups.jsonl"}, "gloo given with train_from"),
        (
            {"weights": "nccl", **ONE_GPU},
            r"gpus_per_trainer: 0\.5 and gpus_per_generator: 0\.5.*NCCL.*object_store \| ipc",
        ),
        ({"weights": "ipc", "device": "cuda"}, r"gpus_per_trainer: 1 and gpus_per_generator: 1"),
        ({"weights": "ipc", **ONE_GPU, "num_generators": 2}, "num_generators: 2, which do not fit"),
        ({"weights": "ipc", **ONE_GPU, "num_trainers": 2}, r"num_trainers: 2; .*num_trainers: 1$"),
        ({"weights": "ipc", **ONE_GPU, "ray__address": "auto"}, "ray.address: auto.*address: null"),
        (
            {"weights": "ipc", **ONE_GPU, "generator__tensor_parallel_size": 2},
            r"tensor_parallel_size: 2.*object_store \| nccl$",
        ),
        ({"weights": "nccl", **TURNS}, r"colocate: true, and NCCL lets.*object_store \| ipc"),
        ({"weights": "ipc", **TURNS, "num_generators": 2, "num_trainers": 2}, "num_trainers: 2"),
    ],
)
def test_a_way_that_is_not_there_is_refused(settings_with, changes, facts):
    with pytest.raises(ValueError, match=rf"^weights: .*{facts}"):
        check_transfer(settings_with(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weights": "gloo", "num_trainers": 2, "generator__tensor_parallel_size": 2},
        {"weights": "object_store", "train_from": "groups.jsonl"},
        {"weights": "nccl", "device": "cuda", "num_generators": 2, "num_trainers": 6},
        {"weights": "ipc", **ONE_GPU},
        {"weights": "ipc", **TURNS},
        {"weights": "ipc", **ONE_GPU, "gpus_per_generator": 0.25, "num_generators": 2},
    ],
)
def test_a_way_that_is_there_is_accepted(settings_with, changes):
    check_transfer(settings_with(**changes))


def test_deltas_go_through_the_object_store_only(settings_with):
    check_transfer(settings_with(push="delta"))
    with pytest.raises(ValueError, match=r"^push: delta given with weights: gloo.*allowed: whole$"):
        check_transfer(settings_with(push="delta", weights="gloo"))


def test_an_unknown_way_is_refused_with_all_that_there_are(refusal):
    assert refusal("weights=rdma").startswith("weights: 'rdma' given; allowed: object_store | nccl")
    assert refusal("weights=nccl").startswith("weights: nccl given with device: cpu")


def test_the_engine_receives_and_the_first_rank_sends_the_same_way(settings_with):
    timeouts = {"weights_s": 7.0}
    for way in ("object_store", "gloo"):
        cfg = settings_with(weights=way, timeouts=timeouts, generator__tensor_parallel_size=2)
        engine = role_arguments._engine_options(cfg, 64)
        opens = role_arguments._rank_options(cfg).open_sender
        assert engine.weight_transfer == (None if way == "object_store" else way)
        if way == "gloo":
            assert opens.args == ("gloo", "cpu")
            assert opens.keywords == {"workers": 2, "timeout_s": 7.0}
        else:
            assert opens is None
