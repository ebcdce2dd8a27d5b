"""The registration of layer classes, which swapkit does not need."""

from __future__ import annotations

from swapkit.errors import InvalidArgument


def accept_module_class(module_class: type) -> None:
    """Do nothing: MindSpeed needs to know the layers that it may plan for; swapkit plans for all.

    Args:
        module_class: class of the layers.

    Raises:
        InvalidArgument: `module_class` is not a class.
    """
    if not isinstance(module_class, type):
        raise InvalidArgument(f"{module_class!r}: expected a module class")
