"""Which connections are shut down to end the collectives of a process."""

from __future__ import annotations

import os
import socket
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed

from swapkit._runtime.torch_compat import process_groups

if TYPE_CHECKING:
    from collections.abc import Iterator

distributed: Any = torch.distributed
LOCAL = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


class Connection:
    """A connection between a listener and a client, both of this process."""

    def __init__(self, family: socket.AddressFamily) -> None:
        with socket.socket(family) as listener:
            listener.bind((LOCAL[family], 0))
            listener.listen()
            self.port = listener.getsockname()[1]
            self.client = socket.create_connection((LOCAL[family], self.port))
            self.server, _ = listener.accept()

    def is_open(self) -> bool:
        self.client.setblocking(False)
        try:
            return self.client.recv(1) != b""
        except BlockingIOError:
            return True

    def close(self) -> None:
        self.client.close()
        self.server.close()


def published(family: int, port: int) -> bytes:
    """Return what gloo publishes: the listener's address as in C, among other bytes."""
    address = struct.pack("=H", family) + struct.pack("!H", port)
    if family == socket.AF_INET:
        return b"\2\0\0\0" + address + socket.inet_pton(family, LOCAL[socket.AF_INET]) + b"\0" * 8
    return b"\2\0\0\0" + address + b"\0" * 4 + socket.inet_pton(family, "::1") + b"\0" * 4


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6])
def connections(request: pytest.FixtureRequest) -> Iterator[list[Connection]]:
    try:
        made = [Connection(request.param) for _ in range(2)]
    except OSError:
        pytest.skip("this machine has no such network")
    yield made
    for each in made:
        each.close()


@pytest.mark.parametrize("key", ["cpu//0/0", "cuda//pg_wrapper:7/0/0"])
def test_collectives_when_ended_then_only_connections_of_gloo_are_shut_down(
    connections: list[Connection], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gloos, other = connections
    store = distributed.HashStore()
    store.set(key, published(gloos.client.family, gloos.port))

    class Group:
        def size(self) -> int:
            return 1

    aborted = []
    monkeypatch.setattr(process_groups, "group_stores", lambda: [(Group(), store, "pg_wrapper:7/")])
    monkeypatch.setattr(process_groups, "abort_groups", lambda: aborted.append(True))
    before = os.listdir("/proc/self/fd")
    assert process_groups.end_collectives() == 2  # both ends are here
    assert os.listdir("/proc/self/fd") == before
    assert not gloos.is_open()
    assert other.is_open()
    assert aborted


def test_collectives_when_there_is_no_process_group_then_nothing_happens() -> None:
    assert process_groups.end_collectives() == 0
