"""Growth in the middle of somebody's own Trainer or Accelerate loop: the examples run, and wrappers stay valid."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainerCallback, TrainingArguments

from conftest import make_tiny
from tokenformer import grow, grow_optimizer

ROOT = Path(__file__).parent.parent
IDS = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["grow_in_trainer", "grow_in_accelerate"])
def test_the_example_runs(name, tmp_path):
    """With fewer steps. Growth does not change the loss, and training goes on."""
    shorter = {**os.environ, "STEPS": "10", "TMPDIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py"], cwd=tmp_path, env=shorter, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    before, after = map(float, re.search(r"loss ([\d.]+) before growth, ([\d.]+) after it", run.stdout).groups())
    end = float(re.search(r"loss ([\d.]+) at the end, with 278,656 parameters", run.stdout).group(1))
    assert abs(after - before) <= 2e-4
    assert end < before
    if name == "grow_in_trainer":
        assert "resumed after 20 steps, ended after 22" in run.stdout


def test_the_page_shows_the_callback_of_the_example():
    page = (ROOT / "docs" / "growing-a-model.md").read_text()
    shown = re.search(r"\nclass GrowAt.*?```", page, re.DOTALL)
    example = (ROOT / "examples" / "grow_in_trainer.py").read_text()
    lines = [line.strip() for line in shown.group().splitlines()[1:-1]]
    assert all(line.replace("grow(model", "tokenformer.grow(model") in example for line in lines)


def step(accelerator, model, optimizer):
    accelerator.backward(model(IDS, labels=IDS).loss)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("inplace", [True, False])
def test_a_prepared_optimizer_follows_and_stays_prepared(inplace, tmp_path):
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*_with_optimizer())
    twin, twin_optimizer = _with_optimizer()
    for _ in range(2):
        step(accelerator, model, optimizer)
        step(accelerator, twin, twin_optimizer)
    bigger = grow(model, 2, inplace=inplace)
    grown = grow_optimizer(optimizer, model, bigger)
    assert type(grown) is type(optimizer)
    assert (grown is optimizer) == inplace
    if not inplace:
        accelerator.free_memory()
        assert accelerator.prepare(bigger, grown) == (bigger, grown)
    twin_bigger = grow(twin, 2)
    twin_grown = grow_optimizer(twin_optimizer, twin, twin_bigger)
    step(accelerator, bigger, grown)
    step(accelerator, twin_bigger, twin_grown)
    for p, q in zip(bigger.parameters(), twin_bigger.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    step(accelerator, bigger, grown)


def _with_optimizer():
    model = make_tiny()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


class GrowAtTwo(TrainerCallback):
    def on_step_end(self, args, state, control, model, optimizer, **kwargs):
        if state.global_step == 2:
            grow(model, 2, method="rotate", inplace=True, optimizer=optimizer)


@pytest.mark.parametrize("how", ["bf16", pytest.param("torch_compile", marks=pytest.mark.slow)])
def test_a_trainer_goes_on_after_growth_with_bf16_and_compiled(how, tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    settings = {"max_steps": 4, "report_to": "none", "use_cpu": True, "save_strategy": "no", how: True}
    trainer = Trainer(make_tiny(), TrainingArguments(tmp_path, **settings), train_dataset=rows, callbacks=[GrowAtTwo()])
    trainer.train()
    keys = trainer.model.model.layers[0].ffn.key_tokens
    assert keys.shape == (512, 64)
    state = trainer.optimizer.state[keys]
    assert state["step"] == 4
    assert state["exp_avg"][256:].ne(0).any()


def test_the_optimizer_of_a_trainer_follows_to_a_new_model(tmp_path):
    """Between two calls of `train`: the second Trainer is given the grown model and its optimizer."""
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    settings = TrainingArguments(tmp_path, max_steps=2, report_to="none", use_cpu=True, save_strategy="no")
    trainer = Trainer(make_tiny(), settings, train_dataset=rows)
    trainer.train()
    bigger = grow(trainer.model, 2)
    optimizer = grow_optimizer(trainer.optimizer, trainer.model, bigger)
    again = Trainer(bigger, settings, train_dataset=rows, optimizers=(optimizer, None))
    again.train()
    state = again.optimizer.state[bigger.model.layers[0].ffn.key_tokens]
    assert state["step"] == 4
    assert state["exp_avg"].shape == (512, 64)
