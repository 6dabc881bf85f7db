"""The interface of an address."""

from grpo_components.cluster.interfaces import network_environment


def test_loopback_is_named_and_an_unknown_address_is_left_to_the_libraries():
    assert network_environment("127.0.0.1") == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    assert network_environment("192.0.2.1") == {}
