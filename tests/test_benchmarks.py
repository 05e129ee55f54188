"""Every benchmark runs with tiny shapes and writes a whole result; what they measure with is right."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import memory
import models
import suite
from long_context import crossing_point
from run_all import SCRIPTS
from timing import Timings
from training_step import shapes

from tokenformer import cost

BENCHMARKS = suite.ROOT / "benchmarks"
WRITTEN = {
    "name",
    "command",
    "repeats",
    "seed",
    "commit",
    "torch",
    "transformers",
    "cpu",
    "threads",
    "dtype",
    "figures",
}

MAY_BE_NEGATIVE = ("residual", "share of", "effect", "correlation")


@pytest.mark.parametrize("name", [*SCRIPTS, "drafts", "agreement", "inspecting"])
def test_a_dry_run_writes_its_result(name, tmp_path, capsys):
    script = importlib.import_module(name)
    suite.run(script.measure, script.__doc__, argv=["--quick", "--repeats", "1", "--out", str(tmp_path)])
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert set(result) >= WRITTEN
    assert result["name"] == name
    assert f"benchmarks/{name}.py --quick" in result["command"]
    assert f"python benchmarks/{name}.py" in script.__doc__
    printed = capsys.readouterr().out
    for line in result["figures"]:
        assert line["measured"] > 0 or any(sign in line["what"] for sign in MAY_BE_NEGATIVE)
        assert (line["target"] is None) == (line["met"] is None)
        assert line["what"] in printed


def test_make_bench_runs_every_benchmark_that_has_figures():
    with_figures = {path.stem for path in BENCHMARKS.glob("*.py") if "run(measure, __doc__" in path.read_text()}
    # Two more need a C++ compiler, and three the run of `make demo`.
    assert with_figures - {"suite", "compiled", "compiled_decoding", "drafts", "agreement", "inspecting"} == set(
        SCRIPTS
    )
    assert "benchmarks/run_all.py" in (suite.ROOT / "Makefile").read_text()


@pytest.mark.parametrize("path", sorted(suite.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_that_are_kept_are_of_full_runs(path):
    result = json.loads(path.read_text())
    assert set(result) >= WRITTEN
    assert "--quick" not in result["command"]


def test_ratios_are_of_neighbours():
    # The machine became three times slower half-way; one was always twice as fast as the other.
    times = Timings({"fast": [1.0, 1.0, 3.0, 3.0], "slow": [2.0, 2.0, 6.0, 6.0]})
    ratio = times.speedup("fast", over="slow")
    assert (ratio.lower, ratio.median, ratio.upper) == (2, 2, 2)


def test_a_target_is_met_as_printed():
    assert suite.figure("a", 1.396, at_least=1.4)["met"]
    assert not suite.figure("a", 1.394, at_least=1.4)["met"]
    assert suite.figure("a", 0.2527, at_most=0.25)["met"]
    assert "MISSED" in suite.table([suite.figure("a", 2.0, at_most=1.0)])


def test_kept_memory_counts_each_array_once_and_no_parameter():
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8)

    def forward():
        y = (x @ weight).exp()  # kept by exp and by the product with itself: one array
        return (y * y).sum()

    assert memory.kept_for_backward(forward, [x, weight]) == 4 * 8 * 4
    assert memory.kept_for_backward(forward, [weight]) == 2 * 4 * 8 * 4


def test_peak_memory_sees_what_was_freed_again():
    size = 64 << 20
    result, peak = memory.peak_of(lambda: lambda: torch.ones(size // 4).mul_(2).sum().item())
    assert result == size / 2
    assert peak == pytest.approx(size, rel=0.1)  # the kernel counts in batches of pages


@pytest.mark.parametrize(("name", "config"), [shape[:2] for quick in (True, False) for shape in shapes(quick)])
def test_the_transformer_has_as_many_parameters(name, config):
    neox = cost.equal_neox(config)
    with torch.device("meta"):
        ours, theirs = models.count(models.build(config)), models.count(models.build(neox))
    assert theirs == cost.parameters(neox).total
    assert theirs == pytest.approx(ours, rel=0.02)
    assert neox.num_hidden_layers == config.num_hidden_layers
    assert 48 <= neox.hidden_size // neox.num_attention_heads <= 80
    assert neox.rope_parameters["partial_rotary_factor"] == config.rope_parameters["partial_rotary_factor"] == 0.25


def test_the_crossing_point():
    assert crossing_point([512, 2048], [0.5, 1.5]) == pytest.approx(1024)
    assert crossing_point([512, 1024], [1.1, 1.2]) == 512
    assert crossing_point([512, 1024], [0.8, 0.9]) is None
    assert 1024 < crossing_point([256, 512, 1024, 2048], [1.1, 0.9, 0.95, 1.2]) < 2048
