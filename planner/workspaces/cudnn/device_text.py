"""The text with which cuDNN describes a card, for questions on a machine without that card.

The names of the fields are those that `libcudnn_graph` names when it reads such a text. Of all fields, only `deviceVer`
changes an answer of the instant heuristics: 144 convolutions were asked with each other number halved and doubled. So
one card of each compute capability stands for all of them.
"""

from __future__ import annotations

import json

_KIB = 1 << 10
_SHARED_BYTES = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""Maximum KiB of shared memory of a thread block by compute capability, from the CUDA C++ Programming Guide."""


def device_text(capability: tuple[int, int]) -> str:
    """Returns the description of a card as the text that cuDNN 9.8 and newer read (CUDNN_ATTR_DEVICEPROP_...)."""
    major, minor = capability
    known = [found for found in _SHARED_BYTES if found <= capability] or [min(_SHARED_BYTES)]
    return json.dumps(
        {
            "deviceVer": 100 * major + 10 * minor,
            "multiProcessorCount": 108,
            "warpSize": 32,
            "maxSharedMemoryPerBlock": 48 * _KIB,
            "maxSharedMemoryPerBlockOptin": _SHARED_BYTES[max(known)] * _KIB,
            "reservedSharedMemoryPerBlock": _KIB if major >= 8 else 0,
            "maxRegistersPerSM": 64 * _KIB,
            "maxCtasPerSM": 32,
            "maxThreadsPerBlock": 1024,
            "maxThreadsPerSM": 2048,
            "regsPerBlock": 64 * _KIB,
            "totalGlobalMem": 40 << 30,
            "smClockRateKHz": 1_410_000,
            "l2CacheSize": 40 << 20,
            "maxBlockSize": [1024, 1024, 64],
            "memClockRateKHz": 1_215_000,
            "maxGridSize": [2**31 - 1, 65_535, 65_535],
            "supportCoopLaunch": 1,
            "pciDeviceId": 0,
            "isTccDriver": 0,
            "cudaDeviceId": 0,
            "driverVer": 13_000,
            "deviceName": "",  # from 9.20 on
            "memoryBusWidth": 5120,  # from 9.28 on
        }
    )
