"""An exported model beside the model itself: bits per byte, size, and the speed of decoding (docs/inference.md).

    python benchmarks/exported.py runs/demo/stage-3/model [TEXT]

Enters: a model folder, and a text file; without one, 16,384 bytes of Python's own library, which the demo is trained
on. It needs the extra `export`. Leaves: a line each for torch, ONNX Runtime, and that with weights of 8 bits. Speeds
are medians of rounds that take turns, one sequence, on as many threads as OMP_NUM_THREADS says.
"""

import argparse
import math
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

import onnxruntime
import torch
from torch.nn import functional as F

from tokenformer.exporting import export_folder, onnx_file
from tokenformer.exporting.graph import graph_of
from tokenformer.models.loading import read_config, read_model
from tokenformer.models.text import encode, read_tokenizer

LENGTH, NEW, ROUNDS = 256, 64, 5


def bits_per_byte(graph, run, ids, text) -> float:
    """Over windows of LENGTH tokens, the first of each left out."""
    lost = 0.0
    for window in ids.split(8):
        mask = torch.ones_like(window)
        call = {"input_ids": window, **graph.beside(mask, 0), "past_key_values": graph.empty_cache(len(window))}
        lost += F.cross_entropy(run(call)["logits"][:, :-1].flatten(0, 1), window[:, 1:].flatten(), reduction="sum")
    return lost / math.log(2) / len(text) * LENGTH / (LENGTH - 1)


def seconds(graph, run) -> float:
    """For NEW tokens after a prompt of one."""
    mask = torch.ones(1, 1, dtype=torch.int64)
    call = {"input_ids": mask, **graph.beside(mask, 0), "past_key_values": graph.empty_cache(1)}
    started = time.perf_counter()
    for _ in range(NEW):
        call = graph.next_step(call, run(call)["present"])
    return time.perf_counter() - started


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    """Export twice, score, time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, nargs="?", default=Path(sysconfig.get_path("stdlib")) / "argparse.py")
    given = parser.parse_args(argv)
    model, tokenizer = read_model(given.model), read_tokenizer(given.model, read_config(given.model))
    text = given.text.read_bytes()[:16_384]
    ids = torch.tensor(encode(tokenizer, text, model.config.vocab_size))
    ids, graph = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH), graph_of(model)
    size = sum(path.stat().st_size for path in given.model.glob("*.safetensors"))
    runs, sizes = {"torch": lambda call: graph.module(**call)}, {"torch": size}
    with tempfile.TemporaryDirectory() as folder:
        for name, int8 in (("onnxruntime", False), ("onnxruntime, int8", True)):
            exported = export_folder(given.model, Path(folder) / name, int8=int8)
            runs[name], sizes[name] = onnx_file.run_onnx(exported.folder / onnx_file.FILE), exported.size
    times = {name: [] for name in runs}
    for _ in range(ROUNDS + 1):
        for name, run in runs.items():
            times[name].append(seconds(graph, run))
    base = statistics.median(times["torch"][1:])
    print(f"onnxruntime {onnxruntime.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name, run in runs.items():
        score, speed = bits_per_byte(graph, run, ids, text), base / statistics.median(times[name][1:])
        print(f"{name}: {score:.4f} bits per byte, {sizes[name] / 1e6:.1f} MB, decodes {speed:.2f} times as fast")


if __name__ == "__main__":
    main()
