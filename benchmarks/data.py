"""How fast text is prepared: with `bytes`, cold and found in the cache, and with a BPE tokenizer on one core.

    python benchmarks/data.py FILE [--tokenizer tokenizer.json] [--repeats 3]

Enters: a text file, best of 100 MB or more (read once before, so that the disk's cache has it). Leaves: MB/s of
preparing and of finding, and the share of a training step that reading batches takes. Without --tokenizer a BPE of
16,384 entries is trained on the first 8 MB.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from tokenformer import TokenFormerConfig, TokenFormerForCausalLM
from tokenformer.data.text import TextData, TextSettings, load_tokenizer, train_tokenizer
from tokenformer.data.text.documents import Corpus
from tokenformer.data.text.encode import TokenizerEncoder
from tokenformer.data.text.sources import TextFile

SAMPLE_BYTES = 8_000_000
BLOCK_LENGTH, BATCH = 256, 16


def timed(work: Callable[[], object]) -> float:
    """Seconds that the work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def step_seconds(data: TextData, steps: int = 5) -> tuple[float, float]:
    """Median seconds to read a batch, and to train on one with the demo's model, the fastest there is."""
    shape = {"hidden_size": 128, "num_hidden_layers": 4, "qkv_tokens": 128, "out_tokens": 128, "ffn_tokens": 512}
    model = TokenFormerForCausalLM(TokenFormerConfig.preset("tiny", vocab_size=data.vocab_size, **shape))
    batches = iter(DataLoader(data.train, BATCH, shuffle=True))
    reading = [timed(lambda: next(batches)) for _ in range(200)]
    training = [timed(lambda: model(**next(batches)).loss.backward()) for _ in range(steps)]
    return statistics.median(reading), statistics.median(training)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokenizer", help="the BPE tokenizer to measure")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    megabytes = len(options.file.read_bytes()) / 1e6
    print(f"{options.file}: {megabytes:.1f} MB")

    with tempfile.TemporaryDirectory() as folder:
        cold, found = [], []
        for i in range(options.repeats):
            config = TextSettings(train=str(options.file), block_length=BLOCK_LENGTH, cache=f"{folder}/{i}")
            cold.append(timed(lambda config=config: TextData(config).prepare()))
            found.append(timed(lambda config=config: TextData(config).prepare()))
        for name, seconds in (("prepared", statistics.median(cold)), ("found in the cache", statistics.median(found))):
            print(f"bytes, {name}: {seconds:.2f} s, {megabytes / seconds:.0f} MB/s")
        reading, training = step_seconds(TextData(config).prepare())
        print(
            f"a batch of {BATCH} x {BLOCK_LENGTH}: read in {reading * 1e3:.2f} ms, "
            f"{reading / training:.2%} of {training * 1e3:.0f} ms for forward and backward"
        )

        sample = Path(folder, "sample.txt")
        with open(options.file, "rb") as file:
            sample.write_bytes(file.read(SAMPLE_BYTES))
        tokenizer = (
            load_tokenizer(options.tokenizer)
            if options.tokenizer
            else train_tokenizer(TextSettings(train=str(sample)), 16_384)
        )
        pieces = list(Corpus([TextFile(str(sample))], "text").pieces())
        encoder = TokenizerEncoder(tokenizer, strict=False)
        seconds = statistics.median(timed(lambda: encoder(pieces)) for _ in range(options.repeats))
        size = sample.stat().st_size / 1e6
        print(f"BPE of {encoder.vocab_size:,} entries, one core: {size / seconds:.2f} MB/s")


if __name__ == "__main__":
    main()
