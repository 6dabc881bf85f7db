"""Real weights through vLLM's engines of `nccl`, on a CPU: exact, checked, never half in use."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from lib.nccl_on_cpu import nccl_on_cpu
from lib.real_engine import assert_same, done, submit, under_way, weights

from grpo_components.exchange.weights import pack_bucket
from grpo_components.training import weight_sender

LIMIT_S = 60


def snapshot(path, ranks=2):
    """The buckets of a push by several ranks."""
    tensors = list(weights(path).items())
    return [pack_bucket(tensors[rank::ranks]) for rank in range(ranks)]


class Way:
    """Stands for the driver: lets the sender send and the receiver receive, in this process."""

    def __init__(self, workers=1):
        self.sender = weight_sender.WeightSender("cpu", workers=workers, host="127.0.0.1")
        self.groups = set()
        self.pool = ThreadPoolExecutor(4)

    def push(self, engine, version, buckets, announced=None, incarnation=0):
        """Send a snapshot; `announced` replaces the manifests that the receiver gets."""
        from grpo_components.rollout.weight_receiver import IncomingWeights

        manifests = announced or [manifest for manifest, _ in buckets]
        group, awaited = self.sender.transfer_group("generator_0", incarnation), Future()
        self.groups.add(group["master_port"])
        received = engine.load_weights(version, IncomingWeights(manifests, group, awaited))
        awaited.result(timeout=LIMIT_S)
        sent = self.pool.submit(self.sender.send_weights, "generator_0", *buckets)
        try:
            return received.result(timeout=LIMIT_S)
        except Exception:
            self.sender.abandon_send("generator_0", incarnation)
            raise
        finally:
            sent.exception(timeout=LIMIT_S)


@pytest.fixture(scope="module")
def on_cpu(build_engine):
    """vLLM's engines run as they are but for streams and communicator."""
    from vllm.distributed.weight_transfer import nccl_engine

    nccl_on_cpu.replace_communicator(nccl_engine)


@pytest.fixture
def open_way(on_cpu, monkeypatch):
    monkeypatch.setattr(weight_sender, "BUFFER_BYTES", 2**14)  # more than two buffers full
    made = []

    def make(**options):
        made.append(Way(**options))
        return made[-1]

    yield make
    for each in made:
        each.pool.shutdown()


@pytest.mark.filterwarnings("ignore:Tensor .* exceeds buffer_size_bytes")
@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_weights_that_were_sent_are_those_of_the_object_store_and_of_a_fresh_engine(
    make_engine, checkpoints, open_way, kind
):
    old, new = checkpoints / f"{kind}_A", checkpoints / f"{kind}_B"
    engine, way = make_engine(old, weight_transfer="nccl"), open_way()
    before, already = done(submit(engine)), nccl_on_cpu.Communicator.broadcasts
    way.push(engine, 3, snapshot(new))
    assert nccl_on_cpu.Communicator.broadcasts - already > 8, "several buffers"
    sent = done(submit(engine))
    way.push(engine, 4, snapshot(old, ranks=1))
    assert len(way.groups) == 1, "one group for all transfers to a process"
    assert_same(done(submit(engine)), before)
    engine.load_weights(5, weights(new)).result(timeout=LIMIT_S)
    assert_same(done(submit(engine)), sent)
    assert_same(done(submit(make_engine(new))), sent)
    assert {int(v) for each in sent for v in each.token_versions} == {3}


def test_tokens_have_exact_versions_under_load_with_the_scheduling_of_a_gpu(
    make_engine, checkpoints, open_way, force_cuda_defaults
):
    force_cuda_defaults()
    old, new = checkpoints / "tied_A", checkpoints / "tied_B"
    engine, other = (make_engine(old, weight_transfer="nccl") for _ in range(2))
    running = under_way(engine)
    open_way().push(engine, 1, snapshot(new))
    sent, running = done(running), under_way(other)
    other.load_weights(1, weights(new)).result(LIMIT_S)
    for ours, theirs in zip(sent, done(running), strict=True):
        for each in (ours, theirs):
            assert set(np.diff(each.token_versions)) == {0, 1}
        both = int(min((each.token_versions == 0).sum() for each in (ours, theirs)))
        np.testing.assert_array_equal(ours.logprobs[:both], theirs.logprobs[:both])


def changed(bucket, name, **fields):
    """The bucket with another entry for one tensor, and the same bytes."""
    manifest, raw = bucket
    return tuple(replace(e, **fields) if e.name == name else e for e in manifest), raw


NORM = "model.norm.weight"


def test_what_is_found_on_arrival_stops_the_engine_with_the_tensors_name_and_no_token_is_sampled(
    make_engine, checkpoints, open_way
):
    """The model is half loaded. A new engine joins another group, and takes the same snapshot."""
    engine, way = make_engine(checkpoints / "tied_A", weight_transfer="nccl"), open_way()
    good = snapshot(checkpoints / "tied_B", ranks=1)
    running = submit(engine, max_tokens=400)
    (manifest, raw), (entry,) = good[0], [e for e in good[0][0] if e.name == NORM]
    damaged = raw.copy()
    damaged[entry.offset + 5] ^= 1
    with pytest.raises(ValueError, match=rf"{NORM} is damaged: checksum mismatch"):
        way.push(engine, 1, [(manifest, damaged)], announced=[manifest])
    with pytest.raises(RuntimeError, match=rf"engine stopped.*{NORM} is damaged"):
        running[0].result(LIMIT_S)
    engine.close()
    again = make_engine(checkpoints / "tied_A", weight_transfer="nccl")
    way.push(again, 1, good, incarnation=1)
    assert len(way.groups) == 2
    assert_same(done(submit(again)), done(submit(make_engine(checkpoints / "tied_B"))))


def test_a_wrong_shape_leaves_the_engine_as_it_is(make_engine, checkpoints, open_way):
    engine, way = make_engine(checkpoints / "tied_A", weight_transfer="nccl"), open_way()
    before = done(submit(engine))
    good = snapshot(checkpoints / "tied_B", ranks=1)
    reshaped = changed(good[0], NORM, shape=(5,))[0]
    with pytest.raises(ValueError, match=rf"{NORM}.*\[5\].*\[64\]"):
        way.push(engine, 1, good, announced=[reshaped])
    assert_same(done(submit(engine)), before)


@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_each_tensor_parallel_worker_takes_its_part_and_checks_the_whole(
    make_engine, checkpoints, open_way, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", nccl_on_cpu.FOLDER)  # of the workers
    engine = make_engine(checkpoints / "tied_A", weight_transfer="nccl", workers=2)
    way, good = open_way(workers=2), snapshot(checkpoints / "tied_B")
    way.push(engine, 7, good)
    two_workers = done(submit(engine))
    assert_same(two_workers, done(submit(make_engine(checkpoints / "tied_B"))), atol=1e-4)
    assert {int(v) for each in two_workers for v in each.token_versions} == {7}
    manifests = [changed(bucket, NORM, checksum=1)[0] for bucket in good]
    with pytest.raises(RuntimeError, match=rf"{NORM} is damaged: checksum mismatch"):
        way.push(engine, 8, good, announced=manifests)


# ---- without an engine --------------------------------------------------------------------------


class Model:
    """Has two parameters, and loads what it is given."""

    def __init__(self):
        self.taken = {}

    def load_weights(self, weights):
        self.taken |= dict(weights)
        return set(self.taken)


A, B = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)


class OnGpu(torch.Tensor):
    """Stands for a tensor on a GPU, which is not copied to the host."""

    is_cuda = True

    def cpu(self):
        raise AssertionError("copied")

    numpy = cpu


def test_a_tensor_on_a_gpu_is_checked_there(build_engine):
    from grpo_components.rollout.weight_receiver import check_tensor

    ((entry,), _) = pack_bucket([("b", B)])
    check_tensor(entry, B.as_subclass(OnGpu))
    changed = torch.tensor([1, 1, 2, 1], dtype=torch.bfloat16).as_subclass(OnGpu)
    with pytest.raises(ValueError, match="b is damaged: checksum mismatch"):
        check_tensor(entry, changed)


def test_what_is_damaged_is_not_passed_on(build_engine):
    from grpo_components.rollout.weight_receiver import CheckedModel

    entries = {entry.name: entry for entry in pack_bucket([("a", A), ("b", B)])[0]}
    model = Model()
    with pytest.raises(ValueError, match="b is damaged: checksum mismatch"):
        CheckedModel(model, entries).load_weights({"a": A, "b": B + 1}.items())
    assert model.taken.keys() <= {"a"}
    checked = CheckedModel(Model(), entries)
    assert checked.load_weights([("a", A)]) | checked.load_weights([("b", B)]) == {"a", "b"}
    assert checked.loaded == {"a", "b"}


def test_a_send_that_was_given_up_reaches_nobody_and_the_next_process_gets_a_group_of_its_own(
    build_engine, open_way
):
    way, bucket = open_way(), pack_bucket([("a", A)])
    given_up = way.sender.transfer_group("generator_0", 0)
    way.sender.abandon_send("generator_0", 0)
    with pytest.raises(ConnectionError, match="generator_0 was given up"):
        way.sender.send_weights("generator_0", bucket)
    again = way.sender.transfer_group("generator_0", 1)
    assert again != given_up
    way.sender.abandon_send("generator_0", 0)  # late
    assert way.sender.transfer_group("generator_0", 1) == again


def test_vllms_newer_model_runner_has_what_a_swap_of_weights_reads():
    """The engines of these tests have the older runner; this one needs a GPU."""
    file = find_spec("vllm.v1.worker.gpu.model_runner").origin
    source = Path(file).read_text()
    for part in ("self.vllm_config = ", "self.model_config = ", "def get_model(self)"):
        assert part in source
