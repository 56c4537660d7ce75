"""Lets vLLM's MooncakeConnector start where there is no accelerator; nothing of the protocol is touched.

The connector asks torch for the current accelerator, which a CPU build does not have, and vLLM's
MultiConnector asserts that each connector has Prometheus metrics, which this one has not (vllm#43828).
"""


def register() -> None:
    """Entry point of the group `vllm.general_plugins`."""
    import torch

    torch.accelerator.current_device_index = lambda: 0

    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.set_device = classmethod(lambda cls, device: None)
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector
    except ImportError:
        return
    mooncake_connector.MooncakeConnector.get_kv_connector_stats = lambda self: None
