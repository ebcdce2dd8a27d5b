"""Fine-tune a vision transformer within a memory budget, with a batch that would not fit otherwise.

    python vision.py --tiny
    python vision.py --size large --rows 256 --budget 22GiB
    python vision.py --size huge --rows 128 --estimate 4090

The weights and the images are random: load yours where `make_training` makes them.
"""

from __future__ import annotations

import argparse

import torch
from common import Training, choose_optimizer, main, make_parser
from torch.nn import functional
from transformers import ViTConfig, ViTForImageClassification

# Width, layers, heads, pixels of an edge, pixels of a patch: of ViT-B/16, L/16 and H/14.
SIZES = {
    "tiny": (64, 2, 4, 32, 8),
    "base": (768, 12, 12, 224, 16),
    "large": (1024, 24, 16, 224, 16),
    "huge": (1280, 32, 16, 224, 14),
}
CLASSES = 1000


def make_training(options: argparse.Namespace, device: torch.device) -> Training:
    """Return the training for the options of the command line."""
    width, layers, heads, pixels, patch = SIZES[options.size]
    config = ViTConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        image_size=pixels,
        patch_size=patch,
        num_labels=CLASSES,
    )
    model = ViTForImageClassification(config).to(device, torch.bfloat16).train()
    optimizer = choose_optimizer(model, device, rate=1e-4)
    images = torch.randn(options.rows, 3, pixels, pixels, dtype=torch.bfloat16, device=device)
    classes = torch.randint(CLASSES, (options.rows,), device=device)

    def find_loss() -> torch.Tensor:
        return functional.cross_entropy(model(images).logits.float(), classes)

    return Training(model, optimizer, find_loss)


def make_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    return make_parser(str(__doc__), list(SIZES), rows=8).parse_args(arguments)


if __name__ == "__main__":
    main(make_options(), make_training)
