"""Names the network interface that a role's libraries must use: the one that Ray uses."""

from __future__ import annotations

import psutil


def network_environment(address: str) -> dict[str, str]:
    """Return the environment variables for gloo, NCCL and vLLM; empty if no interface has it.

    Left alone, each library picks an interface by itself, and maybe one that other nodes, or even
    this one, cannot reach.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if address in (each.address for each in addresses):
            return {
                "GLOO_SOCKET_IFNAME": name,
                "NCCL_SOCKET_IFNAME": f"={name}",  # without it, eth1 would also name eth10
                "VLLM_HOST_IP": address,
            }
    return {}
