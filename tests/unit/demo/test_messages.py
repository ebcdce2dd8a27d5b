"""Every message arrives as it was sent."""

from __future__ import annotations

import pytest

from swapkit.demo.messages import (
    Built,
    Command,
    Finished,
    GarbledError,
    Message,
    OutOfMemory,
    RunAction,
    RunKind,
    RunSpec,
    SegmentRanges,
    Stepped,
    decode,
    encode,
)

SERIES = ((0.0, 1), (0.25, 300))
MESSAGES: tuple[Message, ...] = (
    RunSpec(
        label="swapkit at 60%",
        kind=RunKind.SWAPKIT,
        size="tiny",
        seed=1,
        threads=2,
        parent_pid=3,
    ),
    Command(action=RunAction.BUILD, limit_bytes=2**40),
    Command(action=RunAction.STEP, watched=True),
    SegmentRanges(ranges=((1, 2), (3, 4))),
    Built(),
    Stepped(loss="0x1.8p+0", seconds=0.1, state_bytes=7, stage="search", series=SERIES),
    OutOfMemory(text="line\nline \N{SNOWMAN}", step=1),
    Finished(digest="ab", rescues=3),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_when_sent_then_arrives_equal(message: Message) -> None:
    line = encode(message)
    assert "\n" not in line
    assert decode(line) == message


def test_command_when_decoded_then_its_action_is_one_of_ours() -> None:
    decoded = decode(encode(Command(action=RunAction.QUIT)))
    assert isinstance(decoded, Command)
    assert decoded.action is RunAction.QUIT


@pytest.mark.parametrize(
    "line", ["", "hello", "[]", '["Stepped", {}]', '["X", {}]', '["Command", {"action": "fly"}]']
)
def test_line_when_it_is_no_message_then_refused(line: str) -> None:
    with pytest.raises(GarbledError, match="not a message"):
        decode(line)
