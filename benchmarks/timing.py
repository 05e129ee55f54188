"""Timing in turns: named callables, run one after the other again and again, so that what disturbs one disturbs all.

Enters: callables by name, and how often to run each. Leaves: seconds of every run, their medians, and ratios of runs
that stood side by side, with quartiles. On a shared machine the ratios hold where the seconds do not. Where others take
the cores away in the middle of a run, one thread's processor time still holds: `use_processor_time`.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_clock: Callable[[], float] = time.perf_counter


def use_processor_time() -> None:
    """From now on seconds are those in which this process computed, all threads together."""
    global _clock
    _clock = time.process_time


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios and their quartiles."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, ratios: list[float]) -> "Ratio":
        """From ratios of runs that stood side by side."""
        lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return cls(median, lower, upper)


@dataclass(frozen=True)
class Timings:
    """Seconds of every run, by name, in the order they were run."""

    seconds: dict[str, list[float]]

    @property
    def medians(self) -> dict[str, float]:
        return {name: statistics.median(runs) for name, runs in self.seconds.items()}

    def speedup(self, name: str, over: str) -> Ratio:
        """How many times faster `name` is than `over`."""
        pairs = zip(self.seconds[over], self.seconds[name], strict=True)
        return Ratio.of([slow / fast for slow, fast in pairs])


def seconds(work: Callable[[], object]) -> float:
    """What one run takes."""
    began = _clock()
    work()
    return _clock() - began


def in_turns(work: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 2) -> Timings:
    """Warm every callable up, then run them A, B, …, A, B, … `repeats` times."""
    for _ in range(warmup):
        for call in work.values():
            call()
    runs: dict[str, list[float]] = {name: [] for name in work}
    gc.collect()
    gc.disable()  # a collection would fall on one of a pair
    try:
        for _ in range(repeats):
            for name, call in work.items():
                runs[name].append(seconds(call))
    finally:
        gc.enable()
    return Timings(runs)
