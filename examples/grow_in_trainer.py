# %% [markdown]
# # Grow a model in the middle of Trainer
#
# transformers' Trainer runs as it always does. A callback grows the model and its optimizer in place after half of the
# steps; batches, learning rate, logging and checkpoints go on. It takes about a minute on two CPU cores and downloads
# nothing.
#
# `pip install "tokenformer[train]"`

# %%
import os
import sysconfig
import tempfile
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import tokenformer

STEPS = int(os.environ.get("STEPS", 200))  # before growth, and again after it
torch.manual_seed(0)

# %% [markdown]
# ## Data
# The source of Python's own library, as bytes, in blocks of 128.

# %%
folder = Path(sysconfig.get_paths()["stdlib"])
text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
blocks = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[: len(text) // 128 * 128].view(-1, 128)
held_out, training = blocks[:64], [{"input_ids": block, "labels": block} for block in blocks[64:]]


def held_out_loss(model):
    with torch.no_grad():
        return model(held_out, labels=held_out).loss.item()


# %% [markdown]
# ## A callback that grows
# `inplace=True` keeps the parameters' identity, so Trainer, its scheduler and its optimizer still hold them.
# `optimizer=` lets Adam's moments follow. If either cannot grow, an error says so before anything changes.


# %%
class GrowAt(TrainerCallback):
    def __init__(self, step, **request):
        self.step, self.request = step, request

    def on_step_end(self, args, state, control, model, optimizer, **kwargs):
        if state.global_step == self.step:
            before = held_out_loss(model)
            tokenformer.grow(model, **self.request, inplace=True, optimizer=optimizer)
            print(f"held-out loss {before:.4f} before growth, {held_out_loss(model):.4f} after it")


# %% [markdown]
# ## Train

# %%
output = tempfile.mkdtemp()


def make_trainer(model, steps):
    settings = {"learning_rate": 3e-3, "per_device_train_batch_size": 16, "report_to": "none", "use_cpu": True}
    return Trainer(
        model,
        TrainingArguments(output, max_steps=steps, save_steps=2 * STEPS, disable_tqdm=True, **settings),
        train_dataset=training,
        callbacks=[GrowAt(STEPS, factor=2, method="rotate")],
    )


model = tokenformer.TokenFormerForCausalLM(tokenformer.TokenFormerConfig.preset("tiny"))
make_trainer(model, 2 * STEPS).train()
print(f"held-out loss {held_out_loss(model):.4f} at the end, with {model.num_parameters():,} parameters")

# %% [markdown]
# ## Resume
# A checkpoint holds the model in the size that it had. To resume, load the model from the checkpoint instead of making
# a small one; the callback does not fire again.

# %%
checkpoint = f"{output}/checkpoint-{2 * STEPS}"
trainer = make_trainer(tokenformer.TokenFormerForCausalLM.from_pretrained(checkpoint), 2 * STEPS + 2)
trainer.train(resume_from_checkpoint=checkpoint)
print(f"resumed after {2 * STEPS} steps, ended after {trainer.state.global_step}")
