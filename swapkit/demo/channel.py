"""A run's end of the pipe to its parent."""

import os
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

from swapkit.demo.messages import Command, GarbledError, Message, decode, encode


class Channel:
    """Reads commands, sends messages.

    Threads:
        `send` may be called from any.
    """

    def __init__(self, reader: TextIO, writer: TextIO) -> None:
        """Use two open text streams.

        Args:
            reader: where commands come from.
            writer: where messages go.
        """
        self._reader = reader
        self._writer = writer
        self._sending = threading.Lock()

    @classmethod
    def from_stdio(cls) -> "Channel":
        """Take stdin and stdout over; what others print goes to stderr from now on."""
        sys.stdout.flush()
        writer = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        return cls(sys.stdin, writer)

    def send(self, message: Message) -> None:
        """Send one message.

        Args:
            message: to the parent.
        """
        with self._sending:
            self._writer.write(encode(message) + "\n")
            self._writer.flush()

    def commands(self) -> Iterator[Command]:
        """Give the parent's commands as they come, until it closes its end.

        Raises:
            GarbledError: it sent something else.
        """
        for line in self._reader:
            message = decode(line)
            if not isinstance(message, Command):
                msg = f"a run of the demo takes commands, not {type(message).__name__}"
                raise GarbledError(msg)
            yield message
