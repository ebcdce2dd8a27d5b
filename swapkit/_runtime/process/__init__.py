"""What a process has once: its devices and swappers, scopes, captured operators.

A `Device` (`saved/device.py`) is a backend and the allocator below torch on one device; `runtime`
owns devices and swappers.
"""
