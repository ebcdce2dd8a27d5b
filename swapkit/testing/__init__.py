"""Tools for tests and experiments: links of a given speed, reproducible steps."""

from swapkit.testing.link import slow_link
from swapkit.testing.planning import planning_at_once

__all__ = ["planning_at_once", "slow_link"]
