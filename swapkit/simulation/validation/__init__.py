"""The rules of a plan, derived a second time from the trace alone.

This package shares no code with lowering, the planners or the simulator. A bug stays unnoticed only
if both implementations have it.
"""
