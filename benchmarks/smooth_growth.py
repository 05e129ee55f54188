"""What the first steps after growth do to the training loss (docs/growing-a-model.md has the figures).

    python benchmarks/smooth_growth.py runs/demo/stage-1/checkpoint-280 3e-3

Enters: a training checkpoint of a model of bytes, and the learning rate that it was trained with. Leaves: for every way
to go on after a doubling by rotate, how far the training loss is above that of the model that did not grow, over the
same batches of Python's own library: the largest difference of the first 20 steps, their mean, and the mean of the
steps up to 60. Adam is carried; every way starts from the same state.
"""

import argparse
import copy
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from tokenformer import grow, grow_optimizer, parameter_groups
from tokenformer.models.loading import read_model
from tokenformer.training import optimizer_state
from tokenformer.training.held_rows import NewTokenWarmup

STEPS, FIRST, BLOCK, BATCH, WARM = 60, 20, 256, 8, 50


def batch(text: Tensor, step: int) -> Tensor:
    """The blocks of a step."""
    starts = torch.randint(len(text) - BLOCK, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + BLOCK] for start in starts.tolist()]).long()


def losses(model: torch.nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, warm: int) -> Tensor:
    """Of every step; the rate of appended tokens rises over `warm` steps."""
    new, found = NewTokenWarmup(model, model.last_growth) if warm else None, []
    for step in range(STEPS):
        ids = batch(text, step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        if new is not None and step < warm:
            new.before_step()
        optimizer.step()
        if new is not None and step < warm:
            new.scale_step((step + 1) / (warm + 1))
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.item())
    return torch.tensor(found)


def main(argv: list[str] | None = None) -> None:
    """The loss without growth, then a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("rate", type=float)
    given = parser.parse_args(argv)
    small = read_model(given.checkpoint).train()
    small.config.chunked_loss = False
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)

    def start() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = copy.deepcopy(small)
        groups = parameter_groups(model, given.rate, weight_decay=0.1)
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        optimizer_state.load(given.checkpoint, model, optimizer)
        return model, optimizer

    alone = losses(*start(), text, warm=0)
    print(f"not grown: {alone[:FIRST].mean():.3f}, then {alone[FIRST:].mean():.3f}")
    for name, scaled, warm in (
        ("equal rates", False, 0),
        ("equal rates, new tokens warmed up", False, WARM),
        ("scaled rates", True, 0),
        ("scaled rates, new tokens warmed up", True, WARM),
    ):
        model, optimizer = start()
        before = [group["lr"] for group in optimizer.param_groups]
        larger = grow(model, 2, method="rotate")
        optimizer = grow_optimizer(optimizer, model, larger)
        if not scaled:
            for group, rate in zip(optimizer.param_groups, before, strict=True):
                group["lr"] = rate
        above = losses(larger, optimizer, text, warm) - alone
        first, later = above[:FIRST], above[FIRST:]
        print(f"{name}: largest {first.max():+.3f}, mean {first.mean():+.3f}, then {later.mean():+.3f}", flush=True)


if __name__ == "__main__":
    main()
