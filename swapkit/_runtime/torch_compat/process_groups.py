"""Ending the collectives that this process waits in, from another thread.

NCCL's process groups can be aborted. Gloo's ignore that: a thread that waits for a rank waits until
the group's timeout. But gloo gives up at once when a connection closes, as it does when a rank
dies. So the connections are shut down here: those with an end at an address where gloo listens.
Gloo publishes these addresses in the group's store. Under `TORCH_DISTRIBUTED_DEBUG=DETAIL` each
backend has a helper group of gloo's, in which ranks wait first, so its connections count as well.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

from swapkit._runtime.torch_compat.internals import abort_groups, connect_again, group_stores
from swapkit.texts import get_logger

_log = get_logger("ranks")
_FILES = Path("/proc/self/fd")
_DEVICES = ("cpu", "cuda", "npu")  # for which a group may have a gloo backend
MOST_INTERFACES = 16  # of one rank, from GLOO_SOCKET_IFNAME


def end_collectives() -> int:
    """End all collectives of this process: what waits in one raises torch's error. Any thread.

    The process groups are of no use afterwards, but can be destroyed. The store is asked, so the
    call may take as long as the store.

    Returns:
        The number of gloo's connections that were shut down.
    """
    with suppress(RuntimeError, ValueError):  # a store that is gone; then there is nothing to find
        closed = _shut_down(_find_gloo_addresses())
        try:
            abort_groups()
        except RuntimeError as error:  # of the driver, or of groups that are being destroyed
            _log.warning("cannot abort the process groups: %s", error)
        return closed
    return 0


def _find_gloo_addresses() -> bytes:
    """Return what gloo's backends have published: for each rank, addresses among other bytes."""
    found: list[bytes] = []
    for group, shared, helper in group_stores():
        store = connect_again(shared)  # a thread of the user's may wait in the shared one for hours
        for backend in [f"{device}//{prefix}" for device in _DEVICES for prefix in ("", helper)]:
            for interface in range(MOST_INTERFACES):
                keys = [f"{backend}{interface}/{rank}" for rank in range(group.size())]
                if not store.check(keys):
                    break
                found += store.multi_get(keys)
    return b"\0".join(found)


def _shut_down(addresses: bytes) -> int:
    """Shut down this process's connections with an end at one of the addresses; return how many."""
    count = 0
    for descriptor in [int(file.name) for file in _FILES.iterdir()]:
        with suppress(OSError), _open_copy(descriptor) as connection:
            ends = connection.getsockname(), connection.getpeername()
            if any(_form_of(connection.family, end) in addresses for end in ends):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _open_copy(descriptor: int) -> socket.socket:
    """Return a copy of a socket: the program may close its own, and reuse the number, meanwhile.

    Raises:
        OSError: it is another kind of file.
    """
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _form_of(family: int, end: object) -> bytes:
    """Return the bytes of a `sockaddr_in` or `sockaddr_in6`, without its scope.

    Raises:
        OSError: it is another kind of address.
    """
    if not isinstance(end, tuple) or family not in {socket.AF_INET, socket.AF_INET6}:
        raise OSError("no address of TCP")
    flow = b"" if family == socket.AF_INET else struct.pack("!I", end[2])
    port = struct.pack("=H", family) + struct.pack("!H", end[1])
    return port + flow + socket.inet_pton(family, end[0].partition("%")[0])
