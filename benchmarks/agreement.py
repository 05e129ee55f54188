"""Does the direct effect of a token on a logit foretell what is lost without it? (docs/inside.md)

    make demo && python benchmarks/agreement.py [--quick] [--out FOLDER]

Enters: the last stage of the run that `make demo` leaves in runs/demo, and 256 bytes of Python's argparse.py.
Leaves: for every feed-forward block, over the tokens with the largest effects at each position, the correlation of
direct effects with what ablation takes away, and how much is lost per unit of effect: with the final norm frozen, as
direct effects take it, and free; benchmarks/results/agreement.json.
"""

import argparse as a_text
import sys
from pathlib import Path

import torch
from suite import ROOT, Figure, Options, figure, run

from tokenformer import TokenFormerConfig, TokenFormerForCausalLM
from tokenformer.inside import agreement
from tokenformer.models.loading import read_model

MODEL = ROOT / "runs" / "demo" / "stage-3" / "model"
FIRST, LENGTH, TOKENS = 20_000, 256, 12


def measure(options: Options) -> list[Figure]:
    """A correlation and a ratio for every block and both norms."""
    if options.quick:
        model, length, tokens = TokenFormerForCausalLM(TokenFormerConfig.preset("tiny")).eval(), 16, 2
    elif MODEL.exists():
        model, length, tokens = read_model(MODEL), LENGTH, TOKENS
    else:
        sys.exit(f"{MODEL} does not exist; run make demo")
    text = Path(a_text.__file__).read_bytes()[FIRST : FIRST + length]
    figures = []
    for norm, frozen in (("frozen", True), ("free", False)):
        # As the direct effect has it, the other tokens of a layer keep their weights.
        found = agreement(
            model, torch.tensor([list(text)]), tokens=tokens, layers="*.ffn", keep_norm=frozen, frozen_norm=frozen
        )
        for layer, one in found.items():
            figures.append(figure(f"{layer}, final norm {norm}: correlation", one.correlation))
            figures.append(figure(f"{layer}, final norm {norm}: lost per unit of direct effect", one.ratio))
    return figures


if __name__ == "__main__":
    run(measure, __doc__)
