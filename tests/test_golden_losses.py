"""Loss curves of the tiny presets over 20 steps, against curves on file: silent changes of the numbers show here.

A change that means to move the numbers (initialisation, the loss, the optimizer's defaults) writes them anew and says
why in the change:

    python tests/test_golden_losses.py
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from tokenformer import TokenFormerConfig, TokenFormerForCausalLM, grow, grow_optimizer

GOLDEN = Path(__file__).parent / "golden" / "losses.json"
TEXT = b"A model whose parameters are tokens grows by more of them, and keeps what it has learnt. " * 40
PRESETS = ("tiny", "tiny-2x", "tiny-4x")
# The fused form and the specification part by 3e-6 of the loss over these steps; other machines round otherwise too.
TOLERANCE = 2e-5


def curve(preset: str, **changes) -> list[float]:
    """Losses of 20 AdamW steps; the model doubles its tokens after the tenth."""
    torch.manual_seed(0)
    model = TokenFormerForCausalLM(TokenFormerConfig.preset(preset, **changes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(20):
        if step == 10:
            grow(model, 2.0, method="split", inplace=True)
            grow_optimizer(optimizer, model, model)
        starts = torch.randint(len(TEXT) - 65, (8,), generator=generator).tolist()
        ids = torch.tensor([list(TEXT[start : start + 65]) for start in starts])
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("form", ["reference", "fused"])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_curve_is_the_one_on_file(preset, form):
    golden = json.loads(GOLDEN.read_text())[preset]
    assert golden[-1] < golden[0] - 0.5
    assert curve(preset, pattention_form=form) == pytest.approx(golden, rel=TOLERANCE)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({preset: curve(preset) for preset in PRESETS}, indent=1) + "\n")
    sys.stdout.write(f"written: {GOLDEN}\n")
