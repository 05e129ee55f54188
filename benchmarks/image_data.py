"""How fast images are decoded and augmented: images per second of one core, and what each step takes.

    python benchmarks/image_data.py IMAGES [--size 32] [--images 2000] [--repeats 3]

Enters: any source of images, as CIFAR-10's train.parquet (read once before, so that the disk's cache has it). Leaves:
images per second of a core's own time, which other work on the machine does not count for, of validation, of the crops
and flips usual with CIFAR, of a random resized crop, and of everything; the same by the clock with one worker of a data
loader; and milliseconds for each operation of RandAugment.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader

from tokenformer.data.images import AugmentedInOrder, ImageData, ImageSettings
from tokenformer.data.images.augment import OPERATIONS, operate

CROPS = {"crop_padding": 4, "flip": 0.5}
RESIZED = {"crop_scale": [0.08, 1.0], "flip": 0.5}
EVERYTHING = {**RESIZED, "rand_augment": 2, "erasing": 0.25, "mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1}
BATCH = 64


def timed(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Seconds that the work takes, of this process if no other clock is given."""
    began = clock()
    work()
    return clock() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = options.images - options.images % BATCH

    with tempfile.TemporaryDirectory() as cache:

        def rate(name: str, augment: dict | None, workers: int | None = None) -> None:
            config = ImageSettings(
                images=options.source, size=options.size, validation_fraction=0.0, cache=cache, augment=augment or {}
            )
            data = ImageData(config).prepare()
            order = AugmentedInOrder(data.train, count, seed=0)

            def work() -> None:
                if workers is not None:
                    for _ in DataLoader(order, BATCH, collate_fn=data.collate, num_workers=workers):
                        pass
                    return
                for first in range(0, count, BATCH):
                    places = range(first, first + BATCH)
                    given = data.train.__getitem__ if augment is None else None
                    data.collate([given(order.row(i)) if given else order[i] for i in places])

            work()
            clock = time.process_time if workers is None else time.perf_counter
            seconds = statistics.median(timed(work, clock) for _ in range(options.repeats))
            print(f"{name}: {count / seconds:,.0f} images/s, {seconds / count * 1e3:.2f} ms an image", flush=True)

        rate("validation", None)
        rate("padded crop and flip", CROPS)
        rate("random resized crop and flip", RESIZED)
        rate("the same, RandAugment, erasing, mixup, cutmix", EVERYTHING)
        rate("all that by the clock, one worker of a data loader", EVERYTHING, 1)

    image = torch.rand(3, options.size, options.size, generator=torch.Generator().manual_seed(0))
    for name in OPERATIONS:
        seconds = statistics.median(timed(lambda name=name: operate(name, image, 0.9)) for _ in range(50))
        print(f"{name}: {seconds * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
