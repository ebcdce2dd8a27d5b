"""Fine-tune the UNet of a diffusion model within a memory budget.

    python diffusion.py --tiny
    python diffusion.py --model stable-diffusion-v1-5/stable-diffusion-v1-5 --rows 16 --budget 22GiB
    python diffusion.py --size sd15 --rows 16 --estimate 4090

With a size instead of a model, the weights are random. The latents and texts are random: put those
of your images into `make_training`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import Training, choose_optimizer, main, make_parser
from diffusers import DDPMScheduler, UNet2DConditionModel
from torch.nn import functional

# Channels of each level, pixels of a latent's edge, width of a text's tokens, channels of a head.
SIZES: dict[str, tuple[tuple[int, ...], int, int, int]] = {
    "tiny": ((32, 64), 16, 32, 8),
    "sd15": ((320, 640, 1280, 1280), 64, 768, 8),
}
TEXT_TOKENS = 77
NOISE_STEPS = 1000


def make_model(options: argparse.Namespace) -> Any:
    """Return the UNet."""
    if options.model:
        return UNet2DConditionModel.from_pretrained(options.model, subfolder="unet")
    channels, pixels, text_width, heads = SIZES[options.size]
    crossed = ["CrossAttn"] * (len(channels) - 1)
    return UNet2DConditionModel(
        sample_size=pixels,
        block_out_channels=channels,
        cross_attention_dim=text_width,
        attention_head_dim=heads,
        down_block_types=(*[f"{each}DownBlock2D" for each in crossed], "DownBlock2D"),
        up_block_types=("UpBlock2D", *[f"{each}UpBlock2D" for each in crossed]),
    )


def make_training(options: argparse.Namespace, device: torch.device) -> Training:
    """Return the training for the options of the command line."""
    model = make_model(options).to(device, torch.bfloat16).train()
    optimizer = choose_optimizer(model, device, rate=1e-5)
    scheduler = DDPMScheduler(num_train_timesteps=NOISE_STEPS)
    pixels, text_width = model.config.sample_size, model.config.cross_attention_dim
    like = {"dtype": torch.bfloat16, "device": device}
    latents = torch.randn(options.rows, 4, pixels, pixels, **like)
    text = torch.randn(options.rows, TEXT_TOKENS, text_width, **like)

    def find_loss() -> torch.Tensor:
        noise = torch.randn_like(latents)
        times = torch.randint(NOISE_STEPS, (options.rows,), device=device)
        noisy = scheduler.add_noise(latents, noise, times)
        predicted = model(noisy, times, text).sample
        return functional.mse_loss(predicted.float(), noise.float())

    return Training(model, optimizer, find_loss)


def make_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = make_parser(str(__doc__), list(SIZES), rows=4)
    parser.add_argument("--model", help="the name or folder of a trained model, for diffusers")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(make_options(), make_training)
