"""Programs with several streams, for whoever moves their saved tensors.

They are as those of `tests/programs`: `evict()` wherever memory could run out, and results whose
bits must not depend on what it does.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.cuda.control import keep_busy
from tests.support.threads import on_thread

if TYPE_CHECKING:
    from tests.programs import Evict, Program

SIDE = 128
BUSY_MS = 30


def leaf(*shape: int) -> torch.Tensor:
    shape = shape or (SIDE, SIDE)
    return torch.randn(shape, device="cuda").mul_(0.3).requires_grad_()


def side_streams(count: int) -> list[torch.cuda.Stream]:
    streams = [torch.cuda.Stream() for _ in range(count)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    return streams


def join(streams: list[torch.cuda.Stream]) -> None:
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)


def forward_on_a_side_stream(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    streams = side_streams(1)
    with torch.cuda.stream(streams[0]):
        keep_busy(streams[0], BUSY_MS)
        loss = (x @ x).tanh().exp().sin().sum()
        evict()
    join(streams)
    evict()
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad]


def backward_on_another_thread(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    streams = side_streams(1)
    with torch.cuda.stream(streams[0]):
        loss = (x @ x).tanh().exp().sin().sum()
    evict()
    join(streams)

    def work() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(streams[0])
        with torch.cuda.stream(stream):
            loss.backward()
        torch.cuda.synchronize()

    on_thread(work)
    assert x.grad is not None
    return [loss.detach(), x.grad]


def microbatches_on_two_streams(evict: Evict) -> list[torch.Tensor]:
    weight = leaf()
    streams = side_streams(2)
    losses: list[torch.Tensor] = []
    for number in range(6):
        stream = streams[number % 2]
        with torch.cuda.stream(stream):
            keep_busy(stream, 3)
            x = torch.randn(SIDE, SIDE, device="cuda")
            losses.append(((x @ weight).tanh() @ weight).exp().mul(0.1).sum())
        if number:
            with torch.cuda.stream(streams[(number - 1) % 2]):
                evict()
                losses[number - 1].backward()
    join(streams)
    losses[-1].backward()
    join(streams)
    assert weight.grad is not None
    return [*[loss.detach() for loss in losses], weight.grad]


def made_on_one_stream_and_used_on_another(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    first, second = side_streams(2)
    with torch.cuda.stream(first):
        keep_busy(first, BUSY_MS)
        hidden = (x * 2).sin()
    second.wait_stream(first)
    with torch.cuda.stream(second):
        out = hidden * hidden.exp()
        del hidden
        evict()
        loss = out.sum()
        del out
        evict()
    join([first, second])
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad]


def saved_on_two_streams_and_read_late_by_the_first(
    evict: Evict,
) -> list[torch.Tensor]:
    x = leaf()
    hidden = x * 1
    first, second = side_streams(2)
    with torch.cuda.stream(first):
        early = hidden * hidden
        keep_busy(first, 4 * BUSY_MS)
        late = early + hidden * hidden
    with torch.cuda.stream(second):
        other = hidden.sin()
        del hidden
        for _ in range(6):  # while the first stream has not come to its last use
            time.sleep(0.005)
            (other * 1.5).cos()
            evict()
    evict()
    join([first, second])
    loss = late.sum() + other.sum()
    loss.backward()
    assert x.grad is not None
    return [late.detach(), other.detach(), x.grad]


def unpacked_from_two_streams(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = (x @ x).tanh()
    losses = [hidden.exp().sum(), hidden.sin().sum()]
    del hidden
    evict()
    grads: list[torch.Tensor] = []
    streams = side_streams(2)
    for _ in range(2):
        for stream, loss in zip(streams, losses, strict=True):
            with torch.cuda.stream(stream):
                keep_busy(stream, 5)
                grads += torch.autograd.grad(loss, x, retain_graph=True)
                evict()
    join(streams)
    node: Any = losses[0].grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    with torch.cuda.stream(streams[0]):
        read = node._saved_result * 1
    del node
    streams[1].wait_stream(streams[0])
    with torch.cuda.stream(streams[1]):
        evict()
        grads += torch.autograd.grad(losses[0], x)
    join(streams)
    return [*grads, read]


def graphs_dropped_in_flight(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    (stream,) = side_streams(1)
    for number in range(8):
        with torch.cuda.stream(stream if number % 2 else torch.cuda.current_stream()):
            y = x
            for _ in range(4):
                y = (y * 1.1).sin()
            if number % 3 == 0:
                evict()
                node: Any = y.grad_fn
                node._saved_self  # noqa: B018 - starts copies back, of which nothing is used
                del node
            del y
    join([stream])
    loss = (x @ x).exp().mul(0.1).sum()
    evict()
    return list(torch.autograd.grad(loss, x))


def freed_while_another_stream_copies_it(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    (stream,) = side_streams(1)
    kept = []
    for _ in range(6):
        y = (x * 3).cos()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            keep_busy(stream, 5)
            kept.append(y.detach() * 2)
        loss = (y * y).sum()
        y.record_stream(stream)
        del y
        evict()
        kept += torch.autograd.grad(loss, x)
        del loss
    join([stream])
    return kept


def evicted_in_backward(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    (stream,) = side_streams(1)

    def strike(grad: torch.Tensor) -> None:
        evict()
        with torch.cuda.stream(stream):
            (grad.detach() * 0).sum()

    with torch.cuda.stream(stream):
        y = x
        for _ in range(6):
            y = (y @ x).tanh()
            y.register_hook(strike)
        loss = y.exp().sum()
        del y
    join([stream])
    evict()
    loss.backward()
    assert x.grad is not None
    return [x.grad]


def checkpoints(evict: Evict) -> list[torch.Tensor]:
    grads = []
    for reentrant in (False, True):
        x = leaf()
        (stream,) = side_streams(1)

        def block(value: torch.Tensor) -> torch.Tensor:
            hidden = torch.nn.functional.dropout((value @ value).tanh(), 0.3)
            evict()
            return hidden.exp()

        with torch.cuda.stream(stream):
            hidden = checkpoint(block, x * 1, use_reentrant=reentrant)
            assert isinstance(hidden, torch.Tensor)
            loss = checkpoint(block, hidden.mul(0.1), use_reentrant=reentrant).sum()
            del hidden
            evict()
        join([stream])
        loss.backward()
        assert x.grad is not None
        grads.append(x.grad)
    return grads


def double_backward(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    streams = side_streams(2)
    with torch.cuda.stream(streams[0]):
        loss = (x @ x).tanh().exp().sum()
        evict()
    streams[1].wait_stream(streams[0])
    with torch.cuda.stream(streams[1]):
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        evict()
        penalty = grad.square().sum()
    join(streams)
    evict()
    return [grad.detach(), *torch.autograd.grad(penalty, x)]


def autocast(evict: Evict) -> list[torch.Tensor]:
    layers = torch.nn.Sequential(
        torch.nn.Linear(SIDE, SIDE), torch.nn.GELU(), torch.nn.Linear(SIDE, SIDE)
    ).cuda()
    x = leaf(256, SIDE)
    (stream,) = side_streams(1)
    with torch.cuda.stream(stream), torch.autocast("cuda", dtype=torch.bfloat16):
        hidden = layers(x).tanh()
        evict()
        loss = layers(hidden).float().square().sum()
        del hidden
    join([stream])
    evict()
    return list(torch.autograd.grad(loss, [x, *layers.parameters()]))


PROGRAMS: list[Program] = [
    forward_on_a_side_stream,
    backward_on_another_thread,
    microbatches_on_two_streams,
    made_on_one_stream_and_used_on_another,
    saved_on_two_streams_and_read_late_by_the_first,
    unpacked_from_two_streams,
    graphs_dropped_in_flight,
    freed_while_another_stream_copies_it,
    evicted_in_backward,
    checkpoints,
    double_backward,
    autocast,
]
