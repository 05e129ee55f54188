"""Run folders with made-up measurements, as training leaves them.

By hand, to look at a report: python tests/synthetic_runs.py FOLDER && tokenformer report FOLDER/ladder FOLDER/scratch
"""

import json
import math
import random
import sys
from pathlib import Path

TOKENS_A_STEP = 524_288
AVERAGED = (("ema_validation_loss", 0.9), ("ema_validation_accuracy", 0.11))
RECIPE = "name: ladder\nmodel:\n  preset: 124m\ngrowth:\n  method: split\n  stages:\n  - steps: 2000\n  - factor: 2\n"


def write_run(
    folder: Path, sizes=(124_438_272, 354_127_872, 757_123_456), steps=2000, every=10, method="split", unit="tokens"
) -> Path:
    """A run of one stage for each size. The loss falls with tokens and size, and jumps if growth is random.

    One of images has accuracies too, and an average of the weights.
    """
    chance = random.Random(folder.name)
    entries = []
    flops, step = 0.0, 0

    def add(kind, **values):
        at = {"stage": stage, "step": step, unit: step * TOKENS_A_STEP, "flops": flops, "parameters": size}
        entries.append({"kind": kind, **at, **values})
        if unit == "images":
            entries[-1] |= {
                name.replace("validation_loss", measure): share * value
                for name, value in values.items()
                for measure, share in (("validation_accuracy", 0.1), *AVERAGED)
                if "validation_loss" in name
            }
        else:
            entries[-1] |= {
                name.replace("loss", "bits_per_byte"): 0.35 * value
                for name, value in values.items()
                if "validation_loss" in name
            }

    def settled():
        own = 400 * size**-0.34
        return own + (entered_with - own) * math.exp((started - step) / 300)

    def loss():
        return 1.7 + settled() + 8.3 * (1 + step / 6) ** -0.28 + rise * math.exp((started - step) / 60)

    rise, started, size, entered_with = 0.0, 0, sizes[0], 400 * sizes[0] ** -0.34
    for stage, larger in enumerate(sizes, start=1):
        entered_with, size, started = settled(), larger, step
        if stage > 1:
            rise, before = 0.35 if method == "random" else 0.0, entries[-1]["validation_loss"]
            add(
                "growth",
                method=method,
                parameters_before=sizes[stage - 2],
                validation_loss_before=before,
                validation_loss_after=loss(),
            )
        for own in range(every, steps + 1, every):
            step += every
            flops += 6 * size * TOKENS_A_STEP * every
            add(
                "train",
                loss=loss() + chance.gauss(0, 0.035),
                lr=6e-4 * min(1, own / 100) * min(1.0, (steps - own) / (0.2 * steps) + 0.02),
                grad_norm=None if own == every else 0.4 * math.exp(chance.gauss(0, 0.2)) + 3 * math.exp(-own / 80),
                **{f"{unit}_per_second": 4.1e13 / size * chance.uniform(0.96, 1.02)},
            )
            if own % (every * 20) == 0:
                add("validation", validation_loss=loss() + chance.gauss(0, 0.004))
        add("stage_end", validation_loss=loss())
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


if __name__ == "__main__":
    root = Path(sys.argv[1])
    write_run(root / "ladder")
    write_run(root / "ladder-random", method="random")
    write_run(root / "scratch", sizes=(757_123_456,), steps=4100)
