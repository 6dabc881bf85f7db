"""Every version that is kept comes back to the bit; damage anywhere is named."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from grpo_components.exchange import policy_versions
from grpo_components.exchange.parameter_server import VLLMParameterServer
from grpo_components.exchange.policy_versions import KeptVersions, PolicyVersions, VersionId
from grpo_components.exchange.weight_deltas import NO_BASE, DeltaEncoder
from grpo_components.exchange.weights import pack_bucket, snapshot_checksum, unpack_bucket


def weights(version, dtype=torch.float32):
    """Small steps of one tensor and of a head; one never changes, and one the base model lacks."""
    random = torch.Generator().manual_seed(0)
    start = torch.randn(64, 32, generator=random)
    moved = start * (1 + 1e-5 * version)
    whole = {"steps": moved, "head": moved[:3].T, "frozen": start[5], "more": start[:, 0] + version}
    return {name: tensor.to(dtype).contiguous() for name, tensor in whole.items()}


def buckets(version, dtype=torch.float32):
    """As two ranks push them."""
    tensors = list(weights(version, dtype).items())
    return [pack_bucket(tensors[:2]), pack_bucket(tensors[2:])]


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    tensors = weights(0)
    del tensors["more"]
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "versions"


def same(found, version, dtype=torch.float32):
    expected = weights(version, dtype)
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == dtype for name in found)
    return all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_version_comes_back_to_the_bit_in_any_order(folder, base, monkeypatch, dtype):
    monkeypatch.setattr(policy_versions, "MAX_DEPTH", 3)
    writer = PolicyVersions(folder, base)
    for version in range(1, 9):
        nbytes = writer.keep(0, version, buckets(version, dtype))
        assert nbytes == (folder / "attempt_0" / f"version_{version}").stat().st_size
    kept = KeptVersions(folder, base)
    assert kept.identities() == [VersionId(0, version) for version in range(1, 9)]
    depths = [kept.header(each).depth for each in kept.identities()]
    assert depths == [1, 2, 3, 1, 2, 3, 1, 2]
    for version in (8, 1, 2, 3, 7, 3, 3, 4, 6, 5):
        assert same(kept.state_dict(VersionId(0, version)), version, dtype)
        header = kept.header(VersionId(0, version))
        manifests = [manifest for manifest, _ in buckets(version, dtype)]
        assert header.checksum == snapshot_checksum(manifests), "as receipts have it"
    found = kept.base_state_dict()
    start = weights(0, dtype)
    assert found.keys() == start.keys() - {"more"}
    assert all(torch.equal(found[name], start[name]) for name in found)


def test_what_did_not_change_takes_no_room(folder, base):
    writer = PolicyVersions(folder, base)
    sizes = [writer.keep(0, version, buckets(1)) for version in (1, 2)]
    assert sizes[0] > 3000 and sizes[1] < 1500


def test_pushes_that_are_deltas_are_kept_too_also_by_a_new_process(folder, base):
    encoder, pushes, writer = DeltaEncoder(), [], PolicyVersions(folder, base)
    last = NO_BASE
    for version in range(1, 6):
        pushes.append(encoder.encode(version, pack_bucket(list(weights(version).items())), last))
        last = version
        if version == 4:  # not published: kept only
            writer.keep(0, version, buckets(version))
            continue
        if version != 2:
            writer = PolicyVersions(folder, base)
        writer.keep(0, version, pushes)
    for version in range(1, 6):
        assert same(KeptVersions(folder, base).state_dict(VersionId(0, version)), version)


def test_a_new_process_writes_no_version_again_and_goes_on(folder, base):
    PolicyVersions(folder, base).keep(0, 1, buckets(1))
    path = folder / "attempt_0" / "version_1"
    before = path.stat().st_mtime_ns
    writer = PolicyVersions(folder, base)
    writer.keep(0, 1, buckets(1))
    writer.keep(0, 2, buckets(2))
    assert path.stat().st_mtime_ns == before
    kept = KeptVersions(folder, base)
    assert kept.header(VersionId(0, 2)).base == VersionId(0, 1)
    with pytest.raises(ValueError, match=r"version_1 has other weights"):
        PolicyVersions(folder, base).keep(0, 1, buckets(7))


def test_after_a_rollback_numbers_come_again_with_other_weights(folder, base):
    writer = PolicyVersions(folder, base)
    for attempt, version, content in ((0, 1, 1), (0, 2, 2), (1, 1, 1), (1, 2, 20)):
        writer.keep(attempt, version, buckets(content))
    kept = KeptVersions(folder, base)
    for attempt, version, content in ((0, 2, 2), (1, 2, 20), (1, 1, 1), (0, 1, 1)):
        assert same(kept.state_dict(VersionId(attempt, version)), content)


def test_a_killed_writer_leaves_a_chain_that_can_be_read(folder, base, monkeypatch):
    writer = PolicyVersions(folder, base)
    writer.keep(0, 1, buckets(1))
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        writer.keep(0, 2, buckets(2))
    (folder / "attempt_0" / ".version_2.0123.part").write_bytes(b"policy version")  # SIGKILL
    kept = KeptVersions(folder, base)
    assert kept.identities() == [VersionId(0, 1)]
    assert same(kept.state_dict(VersionId(0, 1)), 1)


def test_a_change_of_any_byte_is_found_in_the_file_and_version_where_it_is(folder, base):
    writer = PolicyVersions(folder, base)
    for version in (1, 2, 3):
        writer.keep(0, version, buckets(version))
    path = folder / "attempt_0" / "version_2"
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    header = whole.index(b"\n", whole.index(b"\n") + 1)
    spots = {*random.integers(0, header, 60), *random.integers(header, len(whole), 60)}
    for spot in sorted(int(each) for each in spots):
        damaged = bytearray(whole)
        damaged[spot] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"version_2 \(version 2 of attempt 0\) is damaged"):
            KeptVersions(folder, base).state_dict(VersionId(0, 3))
    for cut in (0, 10, 200, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"version_2 \(version 2 of attempt 0\) is damaged"):
            KeptVersions(folder, base).bucket(VersionId(0, 3))
    path.unlink()
    with pytest.raises(ValueError, match=r"no file .*version_2: version 2 of attempt 0"):
        KeptVersions(folder, base).state_dict(VersionId(0, 3))
    path.write_bytes((folder / "attempt_0" / "version_1").read_bytes())
    with pytest.raises(ValueError, match="version_2 has version 1 of attempt 0"):
        KeptVersions(folder, base).state_dict(VersionId(0, 2))


def test_another_base_model_is_named_with_its_tensor(folder, base):
    PolicyVersions(folder, base).keep(0, 1, buckets(1))
    tensors = weights(0)
    tensors["head"][0, 0] += 1
    save_file(tensors, base / "model.safetensors")
    for read in (
        lambda kept: kept.state_dict(VersionId(0, 1)),
        lambda kept: kept.base_state_dict(),
    ):
        with pytest.raises(ValueError, match=r"base_model_path: .*base: weight tensor head is not"):
            read(KeptVersions(folder, base))


def test_the_server_hands_out_what_the_files_have(folder, base):
    server = VLLMParameterServer((str(folder), str(base)))
    for version in (1, 2):
        server.keep(0, version, *buckets(version))
    manifest, packed = server.kept(0, 2)
    assert same(unpack_bucket(manifest, packed), 2)
    fresh = snapshot_checksum([each for each, _ in buckets(2)])
    assert snapshot_checksum([manifest]) == fresh, "what a generator answers"
    json.dumps(server.keep(0, 3, *buckets(3)))  # a plain number
