"""The parameter server: only newer versions, and to each generator what it lacks."""

import pytest

from grpo_components.exchange.parameter_server import VLLMParameterServer


def test_a_generator_gets_the_pushes_since_the_one_it_holds():
    server = VLLMParameterServer()
    with pytest.raises(LookupError, match="parameter server"):
        server.newest()
    server.push(2, ["whole 2"], ["manifest 2"])
    server.push(3, ["delta 3"], ["manifest 3"], whole=False)
    server.push(5, ["delta 5"], ["manifest 5"], whole=False)
    everything = ["whole 2", "delta 3", "delta 5"]
    # -1: a new one; 1: before the last whole push; 4: never pushed
    expected = {2: ["delta 3", "delta 5"], 3: ["delta 5"], 5: ["delta 5"]}
    for held, buckets in (expected | dict.fromkeys((-1, 1, 4), everything)).items():
        assert server.newest(held) == (5, buckets, ["manifest 5"])
    server.push(6, ["whole 6"], ["manifest 6"])
    assert server.newest(5) == server.newest() == (6, ["whole 6"], ["manifest 6"])


@pytest.mark.parametrize("version", [2, 3])
def test_a_push_that_is_not_newer_is_refused(version):
    server = VLLMParameterServer()
    server.push(3, [], [])
    with pytest.raises(ValueError, match=f"version {version} .* 3"):
        server.push(version, [], [])
