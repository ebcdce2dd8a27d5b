"""CPUs near a device: where it is attached, which CPUs its threads get, and their binding.

Facts come from sysfs, lspci, NVML and npu-smi. The binding ends with the session.
"""
