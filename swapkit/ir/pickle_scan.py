"""A walk over a pickle before it is read: no length and no index in it exceeds the file.

The unpickler believes a file. An index for its memo, the table of values that are referred to
again, makes it allocate a table of that size: a file of nine bytes can ask for 64 GiB.
"""

from __future__ import annotations

import pickletools

from swapkit.errors import InvalidDocument

_PREFIX_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_STOP = ord(".")
_TWO_LINES = b"ci"  # GLOBAL, INST: the module and the name
_MEMO = {ord("p"): 0, ord("q"): 1, ord("r"): 4}  # PUT (as text), BINPUT, LONG_BINPUT: index bytes
_PLAIN_BYTES = [0] * 256  # of opcodes that need no look at their argument, with it
_COUNTED = {}  # opcode -> bytes of the length in front of its argument
_LINES = {}  # opcode -> lines of its argument
for _opcode in pickletools.opcodes:
    _code = _opcode.code.encode("latin-1")[0]
    _argument_bytes = 0 if _opcode.arg is None else _opcode.arg.n
    if _argument_bytes in _PREFIX_BYTES:
        _COUNTED[_code] = _PREFIX_BYTES[_argument_bytes]
    elif _argument_bytes == pickletools.UP_TO_NEWLINE:
        _LINES[_code] = 2 if _code in _TWO_LINES else 1
    elif _code not in _MEMO and _code != _STOP:
        _PLAIN_BYTES[_code] = 1 + _argument_bytes


def scan_pickle(content: bytes) -> None:
    """Check that a pickle ends, and that its lengths and memo indexes are below its size.

    Raises:
        InvalidDocument: it does not, or it is no pickle.
    """
    position = 0
    try:
        while content[position] != _STOP:
            position += _PLAIN_BYTES[content[position]] or _argument_end(content, position)
    except IndexError:
        raise InvalidDocument(
            f"not a pickle of a memory snapshot: it ends after {len(content)} bytes, in the middle "
            "of a value"
        ) from None


def _argument_end(content: bytes, position: int) -> int:
    """Return the bytes of the opcode at `position` with its argument, and check the argument."""
    code = content[position]
    if code in _LINES:
        end = position
        for _ in range(_LINES[code]):
            end = content.find(b"\n", end + 1)
            if end < 0:
                raise IndexError
        if code in _MEMO:
            _check_index(content[position + 1 : end], content, position)
        return end + 1 - position
    if code in _COUNTED:
        start = position + 1 + _COUNTED[code]
        return start - position + int.from_bytes(content[position + 1 : start], "little")
    if code in _MEMO:
        end = position + 1 + _MEMO[code]
        index = int.from_bytes(content[position + 1 : end], "little")
        _check_index(b"%d" % index, content, position)
        return end - position
    raise InvalidDocument(
        f"not a pickle of a memory snapshot: byte {position} is {code}, which begins no value"
    )


def _check_index(text: bytes, content: bytes, position: int) -> None:
    """Check the index of a memo entry, of which a pickle has at most one for each byte."""
    digits = text.strip()
    if not digits.isdigit() or len(digits) > len(str(len(content))) or int(digits) > len(content):
        raise InvalidDocument(
            f"not a pickle of a memory snapshot: byte {position} refers to value number "
            f"{digits[:20].decode('latin-1')} of {len(content)} bytes"
        )
