"""Fine-tune on several GPUs with FSDP2, each within a budget, or plan it without any GPU.

    torchrun --nproc-per-node 2 fsdp.py --tiny
    torchrun --nproc-per-node 8 fsdp.py --size 7b --budget 40GiB
    python fsdp.py --size 7b --ranks 8 --estimate H100

The model and its options are those of `finetune.py`. Each rank builds the model in host memory and
moves its shard of each layer to its GPU. Each rank has a session of its own; the ranks agree on the
smallest of their budgets. The estimate runs a rank's step on tensors without memory, in a process
group that sends nothing: the times are without communication.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from functools import partial
from unittest import mock

import finetune
import torch
import torch.distributed as dist
from common import Training, estimate_step, main
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import swapkit
from swapkit.reporting.estimates import Estimate

RANKS_OF_A_MACHINE = 8  # at most, for the sum of their copies on the host


def make_training(mesh: DeviceMesh, options: argparse.Namespace, device: torch.device) -> Training:
    """Return the training of one rank, whose weights are a shard of each layer's."""
    if options.tiny:
        options.tokens = 64
    model = finetune.make_model(options, torch.device("cpu")).train()
    whole = finetune.without_adapters(model)
    for layer in whole.model.layers:
        fully_shard(layer, mesh=mesh)  # moves it to the mesh's device
    fully_shard(whole, mesh=mesh)
    # The loss calls parts of the model: the weights outside of layers are gathered around all of
    # it, also one that the embedding and the output layer share.
    whole.find_loss = partial(finetune.find_loss, model)
    register_fsdp_forward_method(whole, "find_loss")
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)
    torch.manual_seed(dist.get_rank())  # each rank has samples of its own
    ids = finetune.make_batch(options, model.config.vocab_size, device)
    return Training(model, optimizer, lambda: whole.find_loss(ids))


def estimate(options: argparse.Namespace, device: str) -> Estimate:
    """Return what a step of one rank needs on a device that is not here."""
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=options.ranks)
    on_machine = {"LOCAL_WORLD_SIZE": str(min(options.ranks, RANKS_OF_A_MACHINE))}
    try:
        mesh = init_device_mesh("cpu", (options.ranks,))
        with mock.patch.dict(os.environ, on_machine), FakeTensorMode():
            training = make_training(mesh, options, torch.device("cpu"))
            training.step()  # makes the optimizer's states
            return estimate_step(training, options, device)
    finally:
        dist.destroy_process_group()


def make_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = finetune.make_parser_of_model(str(__doc__))
    parser.add_argument("--ranks", type=int, default=8, help="with --estimate: how many GPUs")
    options = parser.parse_args(arguments)
    if options.method == "qlora":
        parser.error("--method qlora: FSDP2 does not shard what bitsandbytes has quantised")
    if options.estimate and (options.compile or options.method != "full" or options.ranks < 1):
        parser.error("--estimate is for --ranks of at least 1, --method full, and no --compile")
    if not options.estimate and "WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun, or pass --estimate")
    return options


if __name__ == "__main__":
    options = make_options()
    if options.estimate:
        if options.tiny:
            options.size = "tiny"
        print(estimate(options, options.estimate))
    else:
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        if device.type != "cpu":
            device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        swapkit.install(device=device)  # before anything else uses the device
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
        ranks = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
        with contextlib.redirect_stdout(io.StringIO() if dist.get_rank() else sys.stdout):
            main(options, partial(make_training, ranks))  # the first rank prints
        dist.destroy_process_group()
