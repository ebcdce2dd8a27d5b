"""What the recipes share: their options, the training loop within a budget, and the estimate."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch

import swapkit
from swapkit.reporting.estimates import Estimate


@dataclass
class Training:
    """A model, its optimizer, and a function that returns the loss of one batch."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    find_loss: Callable[[], torch.Tensor]

    def step(self) -> torch.Tensor:
        """Train one step; return its loss."""
        loss = self.find_loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


MakeTraining = Callable[[argparse.Namespace, torch.device], Training]


def make_parser(text: str, sizes: list[str], rows: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all recipes."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--size", choices=sizes, default=sizes[0])
    parser.add_argument("--tiny", action="store_true", help="the smallest model, a few steps")
    parser.add_argument("--rows", type=int, default=rows, help="samples in a batch")
    parser.add_argument("--budget", default="auto", help='"20GiB"; "auto": what is free')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--estimate", metavar="DEVICE", help='train nothing: "4090", "H100", ...')
    return parser


def choose_optimizer(
    model: torch.nn.Module, device: torch.device, rate: float
) -> torch.optim.Optimizer:
    """Return AdamW for the trained parameters, as it runs on a GPU."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.AdamW(trained, lr=rate, foreach=device.type == "meta" or None)


def main(options: argparse.Namespace, make_training: MakeTraining) -> None:
    """Train within the budget, or estimate the step for a device that is not here."""
    if options.tiny:
        options.size, options.steps = "tiny", 6
    if options.estimate:
        print(estimate(options, make_training, options.estimate))
        return
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    swapkit.install(device=device)  # before the model is built
    torch.manual_seed(0)
    training = make_training(options, device)
    with swapkit.budget(options.budget, training.model, training.optimizer) as session:
        for number in range(options.steps):
            print(f"step {number}: loss {training.step().item():.4f}")
    print(session)


def estimate(options: argparse.Namespace, make_training: MakeTraining, device: str) -> Estimate:
    """Return what a step needs on a device that is not here, from tensors without memory."""
    with torch.device("meta"):
        training = make_training(options, torch.device("meta"))
    return estimate_step(training, options, device)


def estimate_step(training: Training, options: argparse.Namespace, device: str) -> Estimate:
    """Return what a step of a training without memory needs on a device that is not here."""
    return swapkit.estimate(
        training.step,
        training.model,
        training.optimizer,
        hardware=device,
        budget=options.budget,
    )
