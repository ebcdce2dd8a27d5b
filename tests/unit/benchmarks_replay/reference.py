"""torch's default allocator once more, as plainly as possible, to compare with."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.replay.native import DeviceAddresses

MIB = 1 << 20


@dataclass
class Part:
    """A part of a segment."""

    address: int
    nbytes: int
    is_free: bool = True


class PlainNative:
    """Segments as lists of parts, which every request searches from end to end."""

    def __init__(self, *, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.allocated_bytes = 0
        self.segments: list[tuple[bool, int, list[Part]]] = []  # small, stream, parts
        self._addresses = DeviceAddresses()

    @property
    def reserved_bytes(self) -> int:
        return sum(part.nbytes for *_, parts in self.segments for part in parts)

    def take(self, nbytes: int, stream: int = 0) -> int | None:
        size = max(512, (nbytes + 511) // 512 * 512)
        small = size <= MIB
        fitting = [
            (part.nbytes, part.address, part, parts)
            for kind, owner, parts in self.segments
            if (kind, owner) == (small, stream)
            for part in parts
            if part.is_free and part.nbytes >= size
        ]
        if fitting:
            *_, part, parts = min(fitting, key=lambda each: each[:2])
        else:
            made = self._grow(size, small, stream)
            if made is None:
                self._empty_cache()
                made = self._grow(size, small, stream)
            if made is None:
                return None
            part, parts = made
        rest = part.nbytes - size
        if rest >= 512 if small else rest > MIB:
            part.nbytes = size
            parts.insert(parts.index(part) + 1, Part(part.address + size, rest))
        part.is_free = False
        self.allocated_bytes += part.nbytes
        return part.address

    def give(self, address: int) -> None:
        for *_, parts in self.segments:
            for part in parts:
                if part.address == address and not part.is_free:
                    part.is_free = True
                    self.allocated_bytes -= part.nbytes
                    self._merge(parts)
                    return
        raise AssertionError(address)

    def _grow(self, size: int, small: bool, stream: int) -> tuple[Part, list[Part]] | None:
        nbytes = (
            2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // MIB // 2) * 2 * MIB
        )
        if self.budget_bytes is not None and self.reserved_bytes + nbytes > self.budget_bytes:
            return None
        part = Part(self._addresses.take(nbytes), nbytes)
        self.segments.append((small, stream, [part]))
        return part, self.segments[-1][2]

    def _empty_cache(self) -> None:
        for *_, parts in self.segments:
            if len(parts) == 1 and parts[0].is_free:
                self._addresses.give(parts[0].address, parts[0].nbytes)
        self.segments = [
            each for each in self.segments if len(each[2]) > 1 or not each[2][0].is_free
        ]

    @staticmethod
    def _merge(parts: list[Part]) -> None:
        for number in reversed(range(1, len(parts))):
            if parts[number].is_free and parts[number - 1].is_free:
                parts[number - 1].nbytes += parts[number].nbytes
                del parts[number]
