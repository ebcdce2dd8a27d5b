"""A run's end of the pipe to its parent."""

import os
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

from swapkit.demo.messages import Command, GarbledError, Message, decode, encode


class Channel:
    """Channel that reads commands and sends messages.

    Threads:
        `send` may be called from any thread.
    """

    def __init__(self, reader: TextIO, writer: TextIO) -> None:
        """Use two open text streams.

        Args:
            reader: source of commands.
            writer: destination of messages.
        """
        self._reader = reader
        self._writer = writer
        self._sending = threading.Lock()

    @classmethod
    def from_stdio(cls) -> "Channel":
        """Take over stdin and stdout; all other output to stdout then goes to stderr."""
        sys.stdout.flush()
        writer = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        return cls(sys.stdin, writer)

    def send(self, message: Message) -> None:
        """Send one message.

        Args:
            message: message to the parent.
        """
        with self._sending:
            self._writer.write(encode(message) + "\n")
            self._writer.flush()

    def commands(self) -> Iterator[Command]:
        """Yield the parent's commands until the parent closes its end.

        Raises:
            GarbledError: the parent sent something else.
        """
        for line in self._reader:
            message = decode(line)
            if not isinstance(message, Command):
                msg = f"a run of the demo expects a Command, got {type(message).__name__}"
                raise GarbledError(msg)
            yield message
