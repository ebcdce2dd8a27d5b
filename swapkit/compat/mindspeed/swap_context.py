"""`TensorSwapContext`: a scope whose saved tensors are swapped, all or those that a function picks.

Source:
    MindSpeed, `fsdp/memory/swap_activation/tensor_swap_manager.py`: name, arguments, attributes.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from swapkit._runtime.process.scopes import opened_for
from swapkit._runtime.shim.types import placement_of
from swapkit.config.environment import read_environment
from swapkit.errors import InvalidArgument, SessionError
from swapkit.registry import Swap

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

    import torch

# The copy back starts this many operators ahead of its use, without prefetching.
LEAST_AHEAD = 1
_numbering = threading.Lock()  # guards `TensorSwapContext.contexts_of`; nothing waits inside


class TensorSwapContext:
    """Swap tensors that are saved inside, as `with swapkit.offload():` does.

    Any thread may enter it, also several times.
    """

    contexts_of: ClassVar[Counter[str]] = Counter()  # number of contexts by tag

    def __init__(
        self,
        module_tag: str = "default",
        custom_check_fn: Callable[[torch.Tensor], bool] | None = None,
        prefetch: bool = True,  # noqa: FBT001, FBT002 - MindSpeed's arguments
    ) -> None:
        """Prepare a context; nothing is swapped before it is entered.

        Args:
            module_tag: a name that the same module of each layer has in common. It only numbers the
                layers: swapkit copies back by operators, not by layers.
            custom_check_fn: says for a tensor whether to swap it; None: all. Tensors that view one
                storage move together. The thread that saves the tensor calls it, with no lock held.
            prefetch: True: copy back as early as memory allows. False: one operator ahead.

        Raises:
            InvalidArgument: `custom_check_fn` is not a function.
        """
        self.set_custom_check_fn(custom_check_fn)
        self.module_tag = module_tag
        with _numbering:
            self.layer_idx = TensorSwapContext.contexts_of[module_tag]
            TensorSwapContext.contexts_of[module_tag] += 1
        self.prefetch = prefetch
        self._entered = threading.local()

    @property
    def layer_nums(self) -> int:
        """The number of contexts with this tag."""
        return TensorSwapContext.contexts_of[self.module_tag]

    def set_custom_check_fn(self, fn: Callable[[torch.Tensor], bool] | None) -> None:
        """Set the function that picks tensors, for the tensors saved from now on.

        Raises:
            InvalidArgument: `fn` is not a function.
        """
        if fn is not None and not callable(fn):
            raise InvalidArgument(f"custom_check_fn={fn!r}: expected a function of a tensor")
        self._check_fn = fn

    def __enter__(self) -> None:
        ahead = None if self.prefetch else LEAST_AHEAD
        swap = Swap(prefetch=ahead, min_bytes=read_environment().min_swap_bytes)
        context = opened_for(placement_of(swap, None), self._picks)
        context.__enter__()
        self._stack().append(context)

    def __exit__(self, *args: object) -> None:
        """End the innermost entry of this thread.

        Raises:
            SessionError: this thread has not entered the context.
        """
        stack = self._stack()
        if not stack:
            raise SessionError("a TensorSwapContext must end on the thread on which it began")
        stack.pop().__exit__(None, None, None)

    def _picks(self, tensor: torch.Tensor) -> bool:
        return self._check_fn is None or bool(self._check_fn(tensor))

    def _stack(self) -> list[contextlib.AbstractContextManager[None]]:
        stack: list[contextlib.AbstractContextManager[None]]
        stack = self._entered.__dict__.setdefault("stack", [])
        return stack
