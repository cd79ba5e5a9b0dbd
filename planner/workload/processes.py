"""Whether several processes train one model together."""

from __future__ import annotations

import torch


def several_processes() -> bool:
    """Whether this is one of several processes of a group (`torch.distributed`)."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
