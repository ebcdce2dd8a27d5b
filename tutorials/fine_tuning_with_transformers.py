"""
Fine-tuning with transformers
=============================

The ``Trainer`` of transformers owns the loop, so the session comes as a callback: it opens when
the optimizer exists, and closes when training ends. TRL's trainers derive from this one and take
the same callback. Needs ``pip install transformers accelerate``.
"""

import tempfile

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import swapkit
from swapkit.integrations.transformers import SwapkitCallback

swapkit.install(device="cpu")  # before the model is built
MIB = 1 << 20

# %%
# Model and data
# --------------
#
# A small Llama with random weights and random words, so that this page needs no download. Yours
# comes from ``from_pretrained``, after ``install``.


def make_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


words = torch.randint(0, 512, (32, 128), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in words]

# %%
# The trainer
# -----------
#
# Nothing in the arguments is about memory. Leave ``gradient_checkpointing`` off: the session
# recomputes what it has to, and only that.


def train(*callbacks):
    """Train; return the trainer, the losses and the parameters."""
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    model = make_model()
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[*callbacks])
    trainer.remove_callback(PrinterCallback)  # which prints every step
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer, losses, [parameter.detach().clone() for parameter in model.parameters()]


_, plain_losses, plain = train()
needed = swapkit.memory_stats()["reserved_bytes.all.peak"]
print(f"plain training reserves {needed / MIB:.0f} MiB")

# %%
# Within two thirds
# -----------------

del _
callback = SwapkitCallback(2 * needed // 3)
trainer, losses, parameters = train(callback)
print(callback.session)
assert callback.session.stats.peak_bytes <= 2 * needed // 3
assert losses == plain_losses
assert all(map(torch.equal, parameters, plain))

# %%
# In the logs
# -----------
#
# The session's metrics are in the trainer's logs, and so in TensorBoard, W&B and other reporters:

last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
print({name: value for name, value in last.items() if name.startswith("swapkit/")})
assert last["swapkit/steps"] == len(losses)
