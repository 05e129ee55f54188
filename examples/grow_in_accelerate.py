# %% [markdown]
# # Grow a model in your own loop, with Accelerate
#
# The loop is the one of Accelerate's guides. After half of the steps, one line grows the model and its optimizer in
# place; the scheduler and everything that was prepared stay as they are. It takes about a minute on two CPU cores and
# downloads nothing.
#
# `pip install "tokenformer[train]"`

# %%
import os
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

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
held_out, training = blocks[:64], blocks[64:]

# %% [markdown]
# ## Prepare

# %%
accelerator = Accelerator(cpu=True)
model = tokenformer.TokenFormerForCausalLM(tokenformer.TokenFormerConfig.preset("tiny"))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=2 * STEPS)
loader = DataLoader(training, batch_size=16, shuffle=True, drop_last=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)


def held_out_loss():
    with torch.no_grad():
        return model(held_out, labels=held_out).loss.item()


# %% [markdown]
# ## Train, grow, train on

# %%
step = 0
while step < 2 * STEPS:
    for rows in loader:
        loss = model(rows, labels=rows).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if step == STEPS:
            before = held_out_loss()
            tokenformer.grow(model, factor=2, method="rotate", inplace=True, optimizer=optimizer)
            print(f"held-out loss {before:.4f} before growth, {held_out_loss():.4f} after it")
        if step == 2 * STEPS:
            break
print(f"held-out loss {held_out_loss():.4f} at the end, with {model.num_parameters():,} parameters")
