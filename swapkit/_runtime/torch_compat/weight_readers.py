"""Methods that read weights by their address, replaced while weights may leave the device.

Such a weight has no address while no operator runs with it: code that reads one gets torch's error.
The methods here are torch's, and those of libraries that save models, for which a right answer is
known. All other code goes on getting the error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from swapkit._runtime.torch_compat import internals, wrappers
from swapkit._runtime.torch_compat.isolation import untraced
from swapkit._runtime.torch_compat.reported_calls import ReplacedMethod


class WeightHolder(Protocol):
    """Brings their bytes. Any thread."""

    def expose(self, tensor: torch.Tensor, /) -> None:
        """Note that code may know the address of a tensor's bytes, which have to stay then."""

    def run_with(self, read: int, written: int, call: Callable[[], Any], /) -> Any:  # noqa: ANN401
        """Call a function while the bytes of two storages are on the device; 0: no storage."""


Method = ReplacedMethod[WeightHolder]


def _replace(find_class: Callable[[], Any], name: str, act: Callable[..., Any]) -> Method:
    """Return a method that `act` runs instead: with a holder, torch's method, and its arguments."""

    def make(plain: Any) -> Callable[..., Any]:  # noqa: ANN401 - torch's method
        @untraced
        def method(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's
            holder = next(iter(replaced.listeners_of(method)), None)
            if holder is None:
                return plain(*args, **kwargs)
            return act(holder, plain, *args, **kwargs)

        return method

    replaced: Method = ReplacedMethod(find_class, name, make)
    return replaced


# ---- on a tensor that stands for the weight ------------------------------------------------------
#
# `tolist`, which also prints a tensor, reads memory on the CPU by its address; `new` and
# `new_tensor` do not know the weight's dispatch key.


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _stand_in(stand_in: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def act(_: WeightHolder, plain: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        try:
            return plain(tensor, *args, **kwargs)
        except RuntimeError:
            return plain(stand_in(tensor), *args, **kwargs)

    return act


# ---- with the bytes on the device ----------------------------------------------------------------
#
# `torch.save` writes storages, and `copy.deepcopy` copies them, one at a time.


def _address_of(value: object) -> int:
    return internals.storage_address(value) if isinstance(value, torch.UntypedStorage) else 0


def _read(holder: WeightHolder, plain: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's
    read = next(filter(None, map(_address_of, (*args, *kwargs.values()))), 0)
    return holder.run_with(read, 0, partial(plain, *args, **kwargs))


def _copy(holder: WeightHolder, plain: Any, own: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    source = next(filter(None, map(_address_of, (*args, *kwargs.values()))), 0)
    return holder.run_with(source, _address_of(own), partial(plain, own, *args, **kwargs))


# ---- as a number ---------------------------------------------------------------------------------
#
# Functions that ask for an address only to tell whether tensors share memory, and where in it they
# are. For a weight, a number that no other memory has serves as well: where its storage object is.

_COMPARE = {
    "torch.serialization": {"persistent_id"},
    "torch._tensor": {"__deepcopy__", "_reduce_ex_internal"},
    "safetensors.torch": {"storage_ptr", "_end_ptr", "_filter_shared_not_shared", "_is_complete"},
    "transformers.modeling_utils": {"_end_ptr", "_find_disjoint", "_find_identical"},
    "huggingface_hub.serialization._torch": {
        "storage_ptr",
        "_end_ptr",
        "_filter_shared_not_shared",
        "_is_complete",
    },
    "accelerate.utils.modeling": {"id_tensor_storage"},
}


def _is_compared() -> bool:
    """Return whether the function that has called the replacement only compares addresses."""
    caller = sys._getframe(2).f_back  # noqa: SLF001 - the replacement's
    names = _COMPARE.get(caller.f_globals.get("__name__", ""), ()) if caller is not None else ()
    if caller is None or caller.f_code.co_name not in names:
        return False
    for method in _COPIED:  # the library may have been imported meanwhile
        method.look_again()
    return True


def _address_of_tensor(holder: WeightHolder, plain: Any, tensor: torch.Tensor) -> Any:  # noqa: ANN401
    if not _is_compared():
        address = plain(tensor)
        holder.expose(tensor)
        return address
    storage = internals.storage_id(tensor) if internals.has_storage(tensor) else 0
    if not wrappers.may_leave(storage):
        return plain(tensor)
    return storage + tensor.storage_offset() * tensor.element_size()


def _address_of_storage(_: WeightHolder, plain: Any, storage: Any) -> Any:  # noqa: ANN401
    number = _address_of(storage)
    return number if _is_compared() and wrappers.may_leave(number) else plain(storage)


# ---- on a copy on the host -----------------------------------------------------------------------
#
# `safetensors` collects the addresses of all tensors before it writes them. Tensors of a GPU it
# copies to the host first; those on the CPU are copied here, out of the pool.


def _on_host(_: WeightHolder, plain: Any, tensor: torch.Tensor, *args: Any) -> Any:  # noqa: ANN401
    if tensor.device.type == "cpu" and wrappers.may_leave(internals.storage_id(tensor)):
        copy = torch.frombuffer(bytearray(tensor.nbytes), dtype=tensor.dtype).view(tensor.shape)
        tensor = copy.copy_(tensor.detach())
    return plain(tensor, *args)


def _copied(name: str) -> Method:
    def find() -> Any:  # noqa: ANN401 - a module
        module = sys.modules.get("safetensors.torch")
        return module if hasattr(module, name) else None

    return _replace(find, name, _on_host)


_COPIED = (_copied("_to_ndarray"), _copied("_tobytes"))  # the second: before safetensors 0.7


def _tensor() -> Any:  # noqa: ANN401 - a class
    return torch.Tensor


def _storage() -> Any:  # noqa: ANN401 - a class
    return torch.UntypedStorage


# Listeners are only who needs them.
BY_ADDRESS: tuple[Method, ...] = (
    _replace(_tensor, "tolist", _stand_in(_copy_of)),
    _replace(_tensor, "new", _stand_in(_empty_like)),
    _replace(_tensor, "new_tensor", _stand_in(_empty_like)),
    _replace(_storage, "copy_", _copy),
    _replace(_storage, "_write_file", _read),
    _replace(internals.file_writer, "write_record", _read),
    _replace(_tensor, "data_ptr", _address_of_tensor),
    _replace(_storage, "data_ptr", _address_of_storage),
    *_COPIED,
)
