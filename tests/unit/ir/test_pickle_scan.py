"""The walk over a pickle: sound ones pass, and none gets more memory than its size warrants."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapkit.errors import InvalidDocument
from swapkit.ir.pickle_scan import scan_pickle
from swapkit.ir.snapshot_files import unpickle_plain

PLAIN = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.integers(-(10**90), 10**90), st.floats(),
        st.text(), st.binary(), st.text(min_size=300, max_size=310),
    ),
    lambda inner: st.one_of(
        st.lists(inner), st.dictionaries(st.text(), inner), st.tuples(inner, inner)
    ),
)  # fmt: skip


@given(PLAIN, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_pickle_when_of_plain_values_then_read(value: object, protocol: int) -> None:
    content = pickle.dumps(value, protocol=protocol)
    scan_pickle(content)
    if protocol >= 3:  # before, bytes are a call of a function
        assert repr(unpickle_plain(io.BytesIO(content))) == repr(value)


@given(st.binary(max_size=40))
def test_bytes_when_arbitrary_then_pass_or_are_refused(content: bytes) -> None:
    with contextlib.suppress(InvalidDocument):  # and no other error
        scan_pickle(content)


BOMBS = {
    "index of a memo": b"\x80\x04]r" + struct.pack("<I", 1 << 26) + b".",
    "index of a memo just beyond the file": b"\x80\x04" + b"N0" * 5 + b"]q\x63.",
    "index of a memo as text": b"(lp67108864\n.",
    "index of a memo with a sign": b"(lp-1\n.",
    "index of a memo with many digits": b"(lp" + b"9" * 5000 + b"\n.",
    "text": b"\x80\x04X" + struct.pack("<I", 1 << 30) + b"a.",
    "long text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 30) + b"a.",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 30) + b"a.",
    "array of bytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 30) + b"a.",
    "number": b"\x80\x04\x8b" + struct.pack("<I", 1 << 30) + b"a.",
}


@pytest.mark.parametrize("content", BOMBS.values(), ids=list(BOMBS))
def test_bomb_when_read_then_refused_and_takes_no_memory(content: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidDocument):
            unpickle_plain(io.BytesIO(content))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "ends after 0 bytes"),
        (b"\x80\x04]", "ends after 3 bytes"),
        (b"\xff.", "byte 0 is 255, which begins no value"),
        (b"cposix\nsystem", "ends after 13 bytes"),
    ],
)
def test_pickle_when_broken_then_says_where(content: bytes, expected: str) -> None:
    with pytest.raises(InvalidDocument, match=expected):
        scan_pickle(content)
