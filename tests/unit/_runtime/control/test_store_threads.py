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
from swapkit._runtime.control import store_threads

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

store_threads.start(ask, name="asks")
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
