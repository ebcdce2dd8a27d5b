"""The board of all ranks, and threads that wait for a store while the program ends."""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed

from swapkit._runtime.control.board import MOST_TEXT, Board, parse, write
from swapkit.errors import InvalidDocument
from swapkit.units import MOST_BYTES

distributed: Any = torch.distributed


@dataclass(frozen=True)
class Inner:
    """A note in another."""

    is_it: bool


@dataclass(frozen=True, kw_only=True)
class Note:
    """One of each form."""

    name: str
    count: int
    seconds: float
    inner: Inner | None
    all: tuple[Inner, ...]
    by_name: dict[str, int]


NOTE = Note(
    name="\udc80", count=3, seconds=0.5, inner=None, all=(Inner(is_it=True),), by_name={"a": 1}
)
FIELDS = ('"n"', "3", "0.5", "null", "[]", "{}")


def make_boards(count: int = 2, store: Any = None) -> list[Board]:
    shared = distributed.HashStore() if store is None else store
    return [Board(lambda: shared, rank=rank, count=count) for rank in range(count)]


def test_note_when_written_and_parsed_then_it_is_the_same() -> None:
    assert parse(write(NOTE).encode(), Note) == NOTE
    assert parse(f"[{', '.join(FIELDS)}]".encode(), Note).seconds == 0.5


@pytest.mark.parametrize(
    ("at", "value"),
    [
        *((0, each) for each in ("null", "5", "[]")),
        *((1, each) for each in ("true", "3.0", "-1", '"3"', "1e999", str(MOST_BYTES + 1))),
        *((2, each) for each in ("true", "-0.1", "NaN", "Infinity", "1e10", "1" + "0" * 400)),
        *((3, each) for each in ("[]", "[1]", "[true, true]", "true", '{"is_it": true}')),
        *((4, each) for each in ("null", "[true]", "[null]", "[[true, 1]]", "{}")),
        *((5, each) for each in ("[]", '{"a": "b"}', '{"a": 1, "a": 1}')),
        *((5, each) for each in ("{}, 1", "{}]]", "[" * 100_000, "9" * 5000)),
        (5, "{}" + " " * MOST_TEXT),
    ],
)
def test_note_when_a_field_has_another_form_then_refused(at: int, value: str) -> None:
    fields = [*FIELDS[:at], value, *FIELDS[at + 1 :]]
    with pytest.raises(InvalidDocument, match=r"^rank 7 published b.* on all ranks$"):
        parse(f"[{', '.join(fields)}]".encode(), Note, "rank 7")


def test_notes_when_some_ranks_have_written_none_then_none_or_those_that_there_are() -> None:
    first, second, third = make_boards(3)
    first.publish("topic", 1)
    third.publish("topic", 2)
    third.publish("topic", 3)
    assert second.read("topic", int, range(3)) == {}
    assert second.read("topic", int, range(3), needs_all=False) == {0: 1, 2: 3}
    assert second.read("topic", int, (0, 2)) == {0: 1, 2: 3}
    assert second.read("other", int, range(3), needs_all=False) == {}


def test_decision_when_two_ranks_write_one_then_the_first_holds_for_all() -> None:
    first, second = make_boards()
    assert first.find("topic", int) is None
    assert second.decide("topic", 2) == 2
    assert first.decide("topic", 1) == 2
    assert [each.find("topic", int) for each in (first, second)] == [2, 2]


def test_name_when_reserved_then_of_one_user_until_that_releases_it_or_ends() -> None:
    (board, _) = make_boards()
    first, second = Inner(is_it=True), Inner(is_it=False)
    assert [board.reserve("topic", each) for each in (first, second)] == ["topic/0", "topic/1"]
    board.release("topic/0")
    assert board.reserve("topic", second) == "topic/0"
    del second
    gc.collect()
    assert board.reserve("topic", first) == "topic/0"


def test_board_when_its_store_is_gone_then_each_request_raises() -> None:
    def find_store() -> Any:
        raise ValueError("gone")

    board = Board(find_store, rank=0, count=2)
    for _ in range(2):
        with pytest.raises(ValueError, match="gone"):
            board.publish("topic", 1)


SERVER = """
import sys
import torch.distributed as distributed
store = distributed.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
# The server is halted while it is asked, and goes on while the interpreter ends.
CLIENT = """
import os, signal, subprocess, sys, threading, time
import torch.distributed as distributed
from swapkit._runtime.control import board

server = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
port = int(server.stdout.readline())
store = distributed.TCPStore("127.0.0.1", port, 1, is_master=False, wait_for_workers=False)
os.kill(server.pid, signal.SIGSTOP)
asking = threading.Event()

def ask():
    asking.set()
    store.check(["key"])

board.start(ask, name="asks")
asking.wait()
time.sleep(0.2)
subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {server.pid}"])  # ends with its input

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(2)  # while the interpreter ends

slow = Slow()
"""


def test_thread_when_a_store_answers_while_the_program_ends_then_it_ends_in_peace() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, SERVER],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# The store needs half a second of a process that is suspended for longer than it may take.
SUSPENDED = """
import os, signal, subprocess, time
from swapkit._runtime.control import board

board.ANSWER_SECONDS = 2.0

def ask(store):
    subprocess.Popen(["sh", "-c", f"sleep 2.5; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    for _ in range(10):
        time.sleep(0.05)
    return store

print(board.Board(lambda: "answer", rank=0, count=2)._ask(ask))
"""


def test_store_when_the_process_is_suspended_for_long_then_it_is_not_mute() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUSPENDED], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr) == ("answer\n", "")
