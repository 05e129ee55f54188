"""Speculative decoding: a model before its growth guesses ahead, and the grown model checks.

    make demo && python benchmarks/drafts.py [--quick] [--repeats N] [--out FOLDER]

Enters: the run that `make demo` leaves in runs/demo; its last stage is the model, each stage before it a draft.
Leaves: for every draft, how many times as fast greedy text comes as without one, the share of guesses that were right,
and how many tokens a pass of the large model gives; benchmarks/results/drafts.json.
"""

import sys
from functools import partial

import torch
from suite import ROOT, Figure, Options, figure, run
from timing import in_turns
from torch import nn

from tokenformer import TokenFormerConfig, TokenFormerForCausalLM, for_inference, grow
from tokenformer.models.loading import read_model
from tokenformer.models.text import byte_tokenizer, encode

RUN = ROOT / "runs" / "demo"
PROMPTS = ("def test_", "import os\n", '    """Return ', "class ")
NEW = 64
GUESSES = 5  # at a time


def stages(quick: bool) -> dict[str, nn.Module]:
    """The models by name, the smallest first."""
    if quick:
        small = TokenFormerForCausalLM(TokenFormerConfig.preset("tiny")).eval()
        return {"stage-1": small, "stage-2": grow(small, factor=2)}
    folders = sorted(RUN.glob("stage-*/model"))
    if len(folders) < 2:
        sys.exit(f"{RUN} has no two stages with a model; run make demo")
    return {folder.parent.name: read_model(folder) for folder in folders}


class Counted:
    """How often a model ran within the `with`, and over how many positions."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.passes, self.positions = model, 0, 0

    def __enter__(self) -> "Counted":
        self.hook = self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        return self

    def __exit__(self, *raised: object) -> None:
        self.hook.remove()

    def _count(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        self.passes += 1
        self.positions += kwargs["input_ids"].shape[1]


def write(model: nn.Module, draft: nn.Module | None, prompts: list[torch.Tensor], new: int) -> list[list[int]]:
    """Greedy text after every prompt."""
    settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return [model.generate(ids, assistant_model=draft, **settings)[0].tolist() for ids in prompts]


def measure(options: Options) -> list[Figure]:
    """Every draft against none, and whether the text is the same."""
    models = {name: for_inference(model) for name, model in stages(options.quick).items()}
    *drafts, last = models
    model, new = models[last], 8 if options.quick else NEW
    prompts = [torch.tensor([encode(byte_tokenizer(), text, model.config.vocab_size)]) for text in PROMPTS]
    for name in drafts:
        settings = models[name].generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = GUESSES, "constant"
        settings.assistant_confidence_threshold = 0.0
    work = {last: partial(write, model, None, prompts, new)}
    work |= {name: partial(write, model, models[name], prompts, new) for name in drafts}
    times, plain, figures = in_turns(work, options.repeats, warmup=1), work[last](), []
    for name in drafts:
        with Counted(model) as checked, Counted(models[name]) as guessed:
            same = work[name]() == plain
        guesses = checked.positions - checked.passes - sum(ids.shape[1] - 1 for ids in prompts)
        right = len(prompts) * new - checked.passes
        details = {
            "the same text": same,
            "parameters": {name: models[name].num_parameters(), last: model.num_parameters()},
            "tokens": len(prompts) * new,
            "passes": {last: checked.passes, name: guessed.passes},
            "guesses at a time": GUESSES,
            "median_seconds": times.medians,
        }
        at = f"{last} with {name} as its draft"
        figures += [
            figure(f"{at}, against none: times as fast", times.speedup(name, over=last), **details),
            figure(f"{at}: share of guesses that were right", right / max(1, guesses)),
            figure(f"{at}: tokens for each pass of {last}", len(prompts) * new / checked.passes),
        ]
    return figures


if __name__ == "__main__":
    run(measure, __doc__, repeats=3)
