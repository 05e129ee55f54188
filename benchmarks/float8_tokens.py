"""What torchao's float8 on parameter tokens does to a trained model (docs/integrations.md has the figures).

    python benchmarks/float8_tokens.py runs/demo/stage-3/model [TEXT]

Enters: a model folder, and a text file; without one, 20,000 bytes of Python's own library, which the demo is trained
on. Leaves: bits per byte and the size of the tokens, before and after.
"""

import argparse
import sysconfig
from pathlib import Path

from torchao.quantization import Float8WeightOnlyConfig, FqnToConfig, quantize_

from tokenformer import pattention_layers
from tokenformer.evaluation import evaluate_text
from tokenformer.models.loading import read_config, read_model
from tokenformer.models.text import read_tokenizer

TOKENS = FqnToConfig({r"re:.*\.(key|value)_tokens": Float8WeightOnlyConfig()})


def main(argv: list[str] | None = None) -> None:
    """Score, quantise, score again; a line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, nargs="?", default=Path(sysconfig.get_path("stdlib")) / "typing.py")
    given = parser.parse_args(argv)
    model, tokenizer = read_model(given.model), read_tokenizer(given.model, read_config(given.model))
    text = given.text.read_bytes()[:20_000]
    numbers = sum(layer.key_tokens.numel() + layer.value_tokens.numel() for _, layer in pattention_layers(model))
    for name, size in (("as it is", model.dtype.itemsize), ("float8", 1)):
        if name == "float8":
            quantize_(model, TOKENS, filter_fn=None)
        score = evaluate_text(model, tokenizer, text)
        print(f"{name}: {score.bits_per_byte:.4f} bits per byte, tokens of {numbers * size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
