"""Models of torch's allocators on a CUDA device, and the replay of requests through an allocator.

The models do what `c10/cuda/CUDACachingAllocator.cpp` of torch does; comments name its functions.
They leave out what depends on the device's timing: a block is free as soon as it is given, as if
all work on it were done. Private pools of CUDA graphs are left out, too.
"""

from swapkit.simulation.allocators.caching import CachingSettings
from swapkit.simulation.allocators.expandable import ExpandableAllocator
from swapkit.simulation.allocators.native import NativeAllocator
from swapkit.simulation.allocators.replaying import (
    Failure,
    ReplayOutcome,
    expandable_peak,
    native_peak,
    replay,
)

__all__ = [
    "CachingSettings",
    "ExpandableAllocator",
    "Failure",
    "NativeAllocator",
    "ReplayOutcome",
    "expandable_peak",
    "native_peak",
    "replay",
]
