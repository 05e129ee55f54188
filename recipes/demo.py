"""Train a small byte-level TokenFormer on the Python library's source, grow it twice, train on. `make demo` runs it.

    python recipes/demo.py [--steps 160 80 60] [--seed 0] [--save FOLDER]

Enters: the .py files of this Python's standard library. Leaves: a table of losses before and after each growth step
and a sample of text.
"""

import argparse
import sys
import sysconfig
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from tokenformer import TokenFormerConfig, TokenFormerForCausalLM, grow, grow_optimizer

CONTEXT, BATCH, LEARNING_RATE, WARMUP = 256, 16, 3e-3, 20


def library_source() -> tuple[Tensor, Tensor]:
    """The standard library as bytes; every twentieth file is held out for validation."""
    folder = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "site-packages", "idlelib", "lib2to3", "__pycache__"}
    files = [f for f in sorted(folder.rglob("*.py")) if not left_out & set(f.relative_to(folder).parts)]
    parts = [torch.frombuffer(bytearray(f.read_bytes() + b"\n"), dtype=torch.uint8) for f in files]
    held_out = parts[::20]
    del parts[::20]
    return torch.cat(parts), torch.cat(held_out)


def blocks(data: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` random blocks of CONTEXT bytes."""
    starts = torch.randint(len(data) - CONTEXT, (count,), generator=generator)
    return torch.stack([data[i : i + CONTEXT] for i in starts.tolist()]).long()


@torch.no_grad()
def validation_loss(model: TokenFormerForCausalLM, data: Tensor) -> float:
    """The mean loss over the same 64 held-out blocks every time."""
    model.eval()
    batches = blocks(data, 64, torch.Generator().manual_seed(1234)).split(BATCH)
    losses = [model(batch, labels=batch).loss for batch in batches]
    model.train()
    return torch.stack(losses).mean().item()


def rate(step: int, total: int, last_stage: int) -> float:
    """Warm up, stay through all growth, and decay over the last stage only: growth needs a high rate after it."""
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP, (total - step) / last_stage)


def main() -> None:
    """Run the stages and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[160, 80, 60], help="steps of each stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write the final model to this folder")
    options = parser.parse_args()
    if min(options.steps) < 1:
        parser.error(f"--steps {' '.join(map(str, options.steps))} was given; every stage needs at least one step")

    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    console = Console(width=None if sys.stdout.isatty() else 100)
    train_data, held_out = library_source()
    megabytes, held_out_megabytes = len(train_data) / 1e6, len(held_out) / 1e6
    console.print(f"Python's library: {megabytes:.1f} MB to train on, {held_out_megabytes:.1f} MB held out")

    config = TokenFormerConfig.preset(
        "tiny", hidden_size=128, num_hidden_layers=4, qkv_tokens=128, out_tokens=128, ffn_tokens=512
    )
    model = TokenFormerForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    table = Table("stage", "parameters", "bytes seen", "loss before growth", "after growth", "after training")
    total, step, loss_before = sum(options.steps), 0, None
    columns = (TextColumn("{task.description}"), *Progress.get_default_columns()[1:-1], TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=total)
        for stage, steps in enumerate(options.steps):
            if stage > 0:
                loss_before = validation_loss(model, held_out)
                grow(model, factor=2, method="split", seed=stage, inplace=True)
                optimizer = grow_optimizer(optimizer, model, model)
            loss_after = validation_loss(model, held_out)
            for _ in range(steps):
                for group in optimizer.param_groups:
                    group["lr"] = rate(step, total, options.steps[-1])
                batch = blocks(train_data, BATCH, generator)
                loss = model(batch, labels=batch).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                progress.update(task, advance=1, description=f"stage {stage + 1}, loss {loss.item():.3f}")
            table.add_row(
                str(stage + 1),
                f"{model.num_parameters():,}",
                f"{step * BATCH * CONTEXT:,}",
                "-" if loss_before is None else f"{loss_before:.4f}",
                f"{loss_after:.4f}",
                f"{validation_loss(model, held_out):.4f}",
            )
    console.print(table)
    if options.save:
        model.save_pretrained(options.save)
        console.print(f"The model is in {options.save}")
    prompt = torch.tensor([list(b"def grow(self, ")])
    out = model.eval().generate(prompt, max_new_tokens=160, do_sample=True, temperature=0.7, top_p=0.9, pad_token_id=0)
    console.print("A sample:")
    console.print(bytes(out[0].tolist()).decode(errors="replace"), markup=False, highlight=False)


if __name__ == "__main__":
    main()
