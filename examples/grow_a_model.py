# %% [markdown]
# # Grow a model
#
# A small language model learns to write Python, is given twice as many parameter tokens, and goes on learning. At the
# moment of growth no prediction changes. It takes about two minutes on two CPU cores and downloads nothing.
#
# `pip install "tokenformer[train]" matplotlib`

# %%
import os
import sysconfig
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import tokenformer

torch.manual_seed(0)
STEPS = int(os.environ.get("STEPS", 300))  # before growth, and again after it

# %% [markdown]
# ## Data
# The source of Python's own library, as bytes.

# %%
folder = Path(sysconfig.get_paths()["stdlib"])
text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
held_out, data = data[:16_384].view(-1, 128), data[16_384:]


def batch(rows=16, length=128):
    starts = torch.randint(len(data) - length, (rows,))
    return torch.stack([data[start : start + length] for start in starts])


# %% [markdown]
# ## Train a small model

# %%
model = tokenformer.TokenFormerForCausalLM(tokenformer.TokenFormerConfig.preset("tiny"))
optimizer = torch.optim.AdamW(tokenformer.parameter_groups(model, lr=3e-3))
curve = []


def held_out_loss(model):
    with torch.no_grad():
        return model(held_out, labels=held_out).loss.item()


def train(model, optimizer, steps):
    for step in range(steps):
        rows = batch()
        loss = model(rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            curve.append((len(curve) * 10 + 10, held_out_loss(model)))


train(model, optimizer, STEPS)
print(f"{model.num_parameters():,} parameters, loss on held-out text {held_out_loss(model):.3f}")

# %% [markdown]
# ## Grow it, and see that nothing changed

# %%
bigger = tokenformer.grow(model, factor=2, method="rotate")
optimizer = tokenformer.grow_optimizer(optimizer, model, bigger)
with torch.no_grad():
    change = (bigger(held_out).logits - model(held_out).logits).abs().max().item()
assert change < 1e-3, change
print(f"{bigger.num_parameters():,} parameters, loss on held-out text {held_out_loss(bigger):.3f}")
print("no prediction changed by more than rounding")

# %% [markdown]
# ## Train on, and look at the curve
# The curve goes on falling: `parameter_groups` lowers the rate of the value tokens as their number grows. Between its
# points, for the first few steps, the loss is a little higher, because the new tokens take full-sized steps at once;
# `tokenformer train` warms them up as well.

# %%
grown_at = len(curve) * 10
train(bigger, optimizer, STEPS)
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.plot(*zip(*curve, strict=True))
axes.axvline(grown_at, color="grey", linestyle="--")
axes.annotate("grown", (grown_at, axes.get_ylim()[1]), (4, -12), textcoords="offset points")
axes.set(xlabel="step", ylabel="held-out loss, nats per byte")
plt.show()
print(f"{bigger.num_parameters():,} parameters, loss on held-out text {held_out_loss(bigger):.3f}")
