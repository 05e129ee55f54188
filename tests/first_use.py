"""What one does first with `pip install tokenformer` and no extra: build, grow, save, load, adopt, generate, score.

    python tests/first_use.py     in an empty folder, which it writes models to

test_packaging.py and test_wheel.py run it, and `make test-versions` in an environment that has nothing else. It needs
neither pytest nor anything from this folder.
"""

import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.utils import logging
from typer.testing import CliRunner

import tokenformer
import tokenformer.cost
import tokenformer.evaluation
import tokenformer.official
from tokenformer_cli import app

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def command(*arguments: str) -> str:
    """What a command prints when it succeeds."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def main() -> None:
    """Every step, with its result looked at."""
    logging.disable_progress_bar()
    model = tokenformer.TokenFormerForCausalLM(tokenformer.TokenFormerConfig.preset("tiny")).eval()
    ids = torch.tensor([list(b"Once upon")])
    before = model(ids).logits
    torch.testing.assert_close(tokenformer.grow(model, factor=2).eval()(ids).logits, before)
    model.save_pretrained("model")
    assert torch.equal(AutoModelForCausalLM.from_pretrained("model")(ids).logits, before)
    GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)).save_pretrained("host")
    with open("text.txt", "w") as text:
        text.write("Once upon a time")

    for name in ("train", "prepare", "generate", "grow", "adopt", "eval", "info", "report"):
        assert name in command("--help")
        assert "Usage" in command(name, "--help")
    command("grow", "model", "grown", "--factor", "2")
    command("adopt", "host", "adopted")
    assert command("generate", "grown", "Once", "--max-new-tokens", "4", "--seed", "0")
    assert "parameters" in command("info", "grown")
    assert "bits per byte" in command("eval", "grown", "--text", "text.txt")


if __name__ == "__main__":
    main()
