"""Train many runs, two at a time, each segment once.

Enters: a list of runs, the more urgent first. Leaves: their segments in runs/lab, and on the terminal one line for a
segment that is started, done or broken. Ctrl-C stops; the same command goes on.
"""

import fcntl
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from .spec import Run, Segment
from .train import Training, folder_of, result_of, task_of, trained

WORKERS = int(os.environ.get("WORKERS", os.cpu_count() or 1))
# A fork has imported everything already: ten seconds less for every segment.
CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


def train_all(plan: Callable[[], Iterable[Run]]) -> None:
    """Train what `plan` asks for; it is asked again when a segment is done, and may then ask for more."""
    working: dict[str, tuple[BaseProcess, Segment, float]] = {}
    failed: set[str] = set()
    try:
        while True:
            for name, (process, segment, began) in list(working.items()):
                if process.exitcode is not None:
                    del working[name]
                    minutes = (time.time() - began) / 60
                    say("FAILED" if process.exitcode else "done", segment, f"{minutes:.1f} min")
                    if process.exitcode:
                        failed.add(name)
            for segment in _ready(plan(), failed) if len(working) < WORKERS else ():
                if segment.name not in working:
                    working[segment.name] = _start(segment), segment, time.time()
                    say("start", segment)
                if len(working) == WORKERS:
                    break
            if not working:
                break
            time.sleep(2)
    finally:
        for process, _, _ in working.values():
            process.terminate()
    if failed:
        raise SystemExit(f"{len(failed)} segments failed; their log.txt in {folder_of(segment).parent} says why")


def _ready(runs: Iterable[Run], failed: set[str]) -> Iterable[Segment]:
    """The segments that can be trained now."""
    for run in runs:
        segments = run.all_segments()
        # A result that is kept has no state to go on from: what comes before a missing one is trained again.
        missing = [segment for segment in segments if trained(segment) is None]
        if missing and result_of(segments[-1]) is None and missing[0].name not in failed:
            yield missing[0]


def _start(segment: Segment) -> BaseProcess:
    task_of(segment.run)  # reads the data, once for all forks
    process = CONTEXT.Process(target=_train, args=(segment,))
    process.start()
    return process


def _train(segment: Segment) -> None:
    """In a process of its own, on one thread; what it prints is in its log."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    folder = folder_of(segment)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    Training(segment).finish()


def say(what: str, segment: Segment, more: str = "") -> None:
    """One line on the terminal."""
    run = segment.run
    made = [growth for growth in run.growths if growth.step < segment.end]
    growths = " ".join(f"{growth.sizes or f'x{growth.factor:g}'} {growth.method} at {growth.step}" for growth in made)
    adapter = f"{run.adapter} " if run.adapter else ""
    print(
        f"{time.strftime('%H:%M:%S')} {what:6} {segment.name} {run.model} lr {run.lr:g} seed {run.seed} {run.schedule} "
        f"{run.text} {adapter}{growths} steps {segment.start} to {segment.end} {more}",
        flush=True,
    )


class OnlyOne:
    """A lock on the store: two pools would train the same segment twice."""

    def __init__(self, store: Path) -> None:
        store.mkdir(parents=True, exist_ok=True)
        self.file = (store / "lock").open("w")

    def __enter__(self) -> None:
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"another process trains in {self.file.name.rpartition('/')[0]}; wait for it") from None

    def __exit__(self, *_: object) -> None:
        self.file.close()
