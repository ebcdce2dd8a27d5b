"""Digests of storages while no memory is free."""

from __future__ import annotations

import pytest
import torch

import swapkit
from swapkit._runtime.operators.checksums import StorageDigests


@pytest.mark.usefixtures("installation")
@pytest.mark.parametrize("nbytes", [8, 2051, 131072, 524289])
def test_digest_when_taken_and_compared_then_it_allocates_nothing(nbytes: int) -> None:
    digests = StorageDigests(torch.device("cpu"))
    bits = torch.arange(nbytes, dtype=torch.uint8)
    storage = bits.untyped_storage()

    def count() -> object:
        return swapkit.memory_stats()["allocation.all.allocated"]

    before = count()
    digest = digests.take(storage, nbytes)
    assert digest is not None
    assert digest.is_of(storage)
    assert count() == before
    bits[-1] ^= 1
    assert not digest.is_of(storage)
