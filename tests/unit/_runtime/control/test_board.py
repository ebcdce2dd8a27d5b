"""Threads that wait for a store's answer while the program ends."""

from __future__ import annotations

import subprocess
import sys

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
