"""Tools for tests and experiments, users' too: links of a given speed."""

from swapkit.testing.link import slow_link

__all__ = ["slow_link"]
