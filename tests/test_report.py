"""`tokenformer report`: what it reads, what its page says, and that the page stands alone."""

import json
import math
import re
import struct
import sys
from datetime import timedelta
from importlib.resources import files
from itertools import combinations
from operator import mul
from pathlib import Path

import pytest

from command import ended, run
from synthetic_runs import RECIPE, write_run
from tokenformer.errors import BadFileError, BadRequestError
from tokenformer.report import load_run, load_runs, write_report
from tokenformer.report.curves import COLOURS, MOST_POINTS, all_axes, count, flops, thin

NAMES = ["loss-vs-compute.png", "loss-vs-tokens.png", "report.html"]


@pytest.fixture
def ladder(tmp_path):
    return write_run(tmp_path / "ladder", steps=400)


@pytest.fixture
def no_pictures(monkeypatch):
    """Leaves out what takes longest, in tests of the page."""
    monkeypatch.setattr("tokenformer.report.page.draw_losses", lambda *args: args[-1].encode())


def page_of(folder, out, **options):
    return write_report(load_runs([folder]), out, **options)[0].read_text()


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page).group(1))


def cells(row):
    return re.findall(r"<td>(.*?)</td>", row)


def append(folder, text):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text)


def entry(kind="train", step=1, **values):
    at = {"kind": kind, "stage": 1, "step": step, "tokens": 100 * step, "flops": 1e6 * step, "parameters": 10}
    return json.dumps(at | {"loss": 2.0, "lr": 0.1, "grad_norm": None, "tokens_per_second": 5} | values) + "\n"


def one_run(folder, *lines):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def test_a_run_is_read_whole(ladder):
    read = load_run(ladder)
    assert (read.label, read.recipe, read.unreadable) == ("ladder", RECIPE, 0)
    assert (len(read.train), len(read.growths), read.ended) == (120, 2, {1, 2, 3})
    assert read.train[0].grad_norm is None
    first, second, third = read.stages
    assert first.growth is None
    assert second.growth.method == "split"
    assert second.growth.loss_before == pytest.approx(first.loss) == pytest.approx(second.growth.loss_after)
    assert third.parameters == 757_123_456
    assert third.seen == 400 * 524_288
    assert third.flops == pytest.approx(6 * third.parameters * third.seen)
    assert sum(stage.seen for stage in read.stages) == read.last[3].seen
    assert second.per_second == pytest.approx(4.1e13 / second.parameters, rel=0.05)


def test_the_validation_curve_has_both_sides_of_a_growth_step(tmp_path):
    read = load_run(write_run(tmp_path / "jumps", steps=400, method="random"))
    step = read.growths[0]
    at = [one.loss for one in read.validation if one.at.step == step.at.step]
    assert at[-2:] == [step.loss_before, step.loss_after]
    assert step.loss_after - step.loss_before == pytest.approx(0.35)


@pytest.mark.parametrize("cut", [1, 2, 40, 100])
def test_a_run_that_is_still_going(ladder, cut, tmp_path, no_pictures):
    """Its last line is cut off in the middle, also inside a character of several bytes."""
    whole = (ladder / "metrics.jsonl").read_bytes()
    lines = whole[: whole.index(b'{"kind": "stage_end", "stage": 3')]
    (ladder / "metrics.jsonl").write_bytes(
        lines + '{"kind": "trâin", "stage": 3, "step": 7000, "tokens"'.encode()[:cut]
    )
    read = load_run(ladder)
    assert (len(read.train), read.unreadable) == (120, 0)
    page = page_of(ladder, tmp_path / "out")
    assert "Stage 3 has not ended." in page
    assert " so far</td>" in page


def test_a_last_line_without_its_newline_counts_if_it_is_whole(tmp_path):
    folder = one_run(tmp_path / "run", entry(), entry(step=2).rstrip("\n"))
    assert len(load_run(folder).train) == 2


def test_what_is_unknown_is_ignored_and_what_is_broken_is_counted(tmp_path, no_pictures):
    folder = one_run(
        tmp_path / "run",
        entry(note="new", loss=float("nan")),
        '{"kind": "weather"}\n\n',
        '{"kind": "train", "sta{"kind": "train"}\n',
        "17\n",
        entry(loss="low"),
        entry(flops=float("inf")),
        entry("validation", step=2, validation_loss=None),
    )
    read = load_run(folder)
    assert (len(read.train), len(read.validation), read.unreadable) == (1, 1, 4)
    assert read.train[0].loss is None
    page = page_of(folder, tmp_path / "out")
    assert "could not be read: 4." in page
    assert "no recipe.yaml" in page
    assert data_of(page)["runs"][0]["training"] == []


def test_the_table_of_stages(ladder, tmp_path, no_pictures):
    page = page_of(ladder, tmp_path / "out")
    section = page[page.index("<section") :]
    rows = [cells(row) for row in re.findall(r"<tr>(.*?)</tr>", section)]
    stages = load_run(ladder).stages
    assert [row[0] for row in rows[1:]] == ["1", "2", "3", "all"]
    second, loss = rows[2], f"{stages[0].loss:.3f}"
    assert second[:5] == ["2", "split", "354,127,872", "210M", "446 PFLOPs"]
    assert second[5] == str(timedelta(seconds=round(stages[1].seconds)))
    assert second[6:8] == [loss, loss]
    last = [f"{stages[1].loss:.3f}", f"{stages[1].per_second:,.0f}", f"{0.35 * stages[1].loss:.3f}"]
    assert second[8:] == last
    assert rows[1][6:8] == ["–", "–"]
    assert rows[4][3:5] == ["629M", "1.55 EFLOPs"]
    assert f"<pre>{RECIPE}</pre>" in page


def test_what_the_figures_draw(ladder, tmp_path, no_pictures):
    data = data_of(page_of(ladder, tmp_path / "out"))
    compute = data["axes"][0]
    titles = [axis["title"] for axis in data["axes"]]
    assert titles == ["training compute, EFLOPs", "training tokens, millions", "training time, minutes"]
    (drawn,) = data["runs"]
    assert [growth["parameters"] for growth in drawn["growths"]] == ["124M → 354M", "354M → 757M"]
    assert all(len(set(growth["loss"].split(" → "))) == 1 for growth in drawn["growths"])
    assert drawn["growths"][0]["at"][:2] == pytest.approx([0.15658, 209.7], rel=1e-3)
    assert drawn["training"][-1][:3] == pytest.approx([axis["end"] for axis in data["axes"]], rel=1e-5)
    low, high = compute["linear_loss"]
    assert low < drawn["validation"][-1][-1] < high < drawn["training"][0][-1]
    assert max(point[-1] for point in drawn["lr"]) == pytest.approx(6)
    assert len(drawn["grad_norm"]) == 117


def test_time_is_that_of_the_steps(tmp_path):
    """From the speeds, so that a run may have been stopped for a night; unknown where no speed was measured."""
    lines = [entry(step=1, tokens_per_second=50), entry(step=3), entry("validation", step=3, validation_loss=2.0)]
    read = load_run(one_run(tmp_path / "run", *lines))
    assert [one.at.seconds for one in read.train] == [100 / 50, 100 / 50 + 200 / 5]
    assert (read.validation[0].at.seconds, read.stages[0].seconds) == (42, 42)
    unknown = load_run(one_run(tmp_path / "unknown", entry(tokens_per_second=None), entry(step=2, tokens_per_second=0)))
    assert [axis.name for axis in all_axes([read])] == ["flops", "seen", "seconds"]
    assert [axis.name for axis in all_axes([read, unknown])] == ["flops", "seen"]


def test_axes_are_labelled(ladder, tmp_path, no_pictures):
    page = page_of(ladder, tmp_path / "out")
    labels = re.findall(r'data-label="(.*?)"', page)
    assert labels == ["learning rate, 10⁻⁴", "norm", "tokens/s, thousands", "bits per byte"]
    assert "${title}, logarithmic" in page  # which page.js adds where it is


def test_no_folder_of_the_authors_machine_is_in_the_page(ladder, tmp_path, no_pictures):
    paths = ["train: /home/me/my corpus/a.txt", "- '/home/me/b'", "cache: ~/secret/c", "output_dir: C:\\me\\d"]
    kept = ["train: corpus/e", "tokenizer: org/name", "url: hf://org/name", "learning_rate: 0.001", "empty: /"]
    (ladder / "recipe.yaml").write_text("\n".join(paths + kept))
    page = page_of(ladder, tmp_path / "out")
    shown = re.search(r"<pre>(.*?)</pre>", page, re.DOTALL).group(1).replace("&#x27;", "'").splitlines()
    assert shown == ["train: …/a.txt", "- '…/b'", "cache: …/c", "output_dir: …/d", *kept]
    assert str(tmp_path) not in page
    assert "/home/me" not in page


def linear(colour):
    """The red, green and blue of a colour as light."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]


def contrast(one, other):
    """As the Web Content Accessibility Guidelines define it."""
    low, high = sorted(sum(map(mul, (0.2126, 0.7152, 0.0722), linear(colour))) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def mixed(colour, paper, opacity):
    parts = zip(bytes.fromhex(colour[1:]), bytes.fromhex(paper[1:]), strict=True)
    return "#" + bytes(round(opacity * a + (1 - opacity) * b) for a, b in parts).hex()


def oklab(colour):
    """Coordinates in which equal distances look equally different."""
    red, green, blue = linear(colour)
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    middle = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


def test_lines_can_be_seen_on_light_and_dark_paper_and_told_apart():
    style = files("tokenformer.report").joinpath("page.css").read_text()
    papers, opacities = re.findall(r"--paper: (#\w+)", style), re.findall(r"--faint: ([\d.]+)", style)
    assert len(COLOURS) == 16
    for mode, (paper, opacity, least) in enumerate(zip(papers, opacities, (2, 3), strict=True)):
        colours = [pair[mode] for pair in COLOURS]
        for colour in colours:
            assert contrast(colour, paper) > 3, colour
            assert contrast(mixed(colour, paper, float(opacity)), paper) > least, colour
        for one, other in combinations(colours, 2):
            assert math.dist(oklab(one), oklab(other)) > 0.09, (one, other)


def test_the_page_stands_alone_and_takes_no_html_from_a_run(tmp_path, no_pictures):
    name = "<b>&\"'</script>$x$".replace("/", "∕")
    folder = write_run(tmp_path / name, steps=100, method="</script><img src=x onerror=alert(1)>")
    (folder / "recipe.yaml").write_text("name: </pre><script>alert(1)</script>\n")
    page = page_of(folder, tmp_path / "out", log=True)
    assert not re.search(r"https?:|//[a-z]|\bsrc=(?!x)|<link|@import|url\((?!#)", page)
    assert "<img" not in page
    assert "<b>&" not in page
    assert page.count("<script") == page.count("</script>") == 2
    data = data_of(page)
    assert (data["log"], data["runs"][0]["label"]) == (True, name)


def test_pictures_of_the_promised_kind(tmp_path):
    """With names and numbers that matplotlib could take for something else."""
    write_run(tmp_path / "_$x$", steps=100)
    one_run(tmp_path / "short", entry("validation", step=0, validation_loss=3.0))
    runs = load_runs([tmp_path / "_$x$", tmp_path / "short"])
    for log in (False, True):
        written = write_report(runs, tmp_path / "out", log)
        for path in written[1:]:
            head = path.read_bytes()[:24]
            assert head.startswith(b"\x89PNG")
            assert struct.unpack(">II", head[16:]) == (1600, 960)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == NAMES


def test_a_run_of_images_has_accuracies(tmp_path, no_pictures):
    folder = write_run(tmp_path / "classifier", steps=200, unit="images")
    read = load_run(folder)
    last = read.stages[-1]
    assert (read.unit, last.seen, read.unreadable) == ("images", 200 * 524_288, 0)
    assert [last.accuracy, last.averaged_loss, last.averaged_accuracy] == pytest.approx(
        [0.1 * last.loss, 0.9 * last.loss, 0.11 * last.loss]
    )
    written = write_report([read], tmp_path / "out")
    assert [path.name for path in written] == ["report.html", "loss-vs-compute.png", "loss-vs-images.png"]
    page = written[0].read_text()
    assert "tokens" not in page[: page.index("<pre>")]
    section = page[page.index("<section") :]
    assert "<th>val.<br>accuracy</th><th>val. loss,<br>averaged</th><th>accuracy,<br>averaged</th>" in section
    rows = [cells(row) for row in re.findall(r"<tr>(.*?)</tr>", section)]
    assert rows[3][10:] == [f"{x:.3f}" for x in (last.accuracy, last.averaged_loss, last.averaged_accuracy)]
    data = data_of(page)
    (drawn,) = data["runs"]
    assert (data["axes"][1]["title"], data["loss_label"]) == ("training images, millions", "loss, nats per image")
    assert drawn["accuracy"][-1][-1] == pytest.approx(last.accuracy, rel=1e-4)
    assert [point[:2] for point in drawn["accuracy"]] == [point[:2] for point in drawn["validation"]]
    overview = page[page.index('id="runs"') : page.index('id="controls"')]
    assert f"<td>{last.accuracy:.3f}</td>" in overview


def test_text_and_images_are_not_drawn_together(tmp_path):
    folders = [write_run(tmp_path / unit, steps=100, unit=unit) for unit in ("tokens", "images")]
    ended(run("report", *folders), 2, "tokens counts tokens and images images, whose losses cannot be compared")


def test_a_report_is_replaced_and_a_foreign_file_is_not(ladder, tmp_path, no_pictures):
    out = tmp_path / "out"
    out.mkdir()
    runs = load_runs([ladder])
    (out / "report.html").write_text("mine")
    with pytest.raises(BadRequestError, match=r"report\.html was not written by this command"):
        write_report(runs, out)
    assert (out / "report.html").read_text() == "mine"
    (out / "report.html").unlink()
    (out / "report.html").mkdir()
    with pytest.raises(BadRequestError, match="was not written by this command"):
        write_report(runs, out)


def test_a_failure_leaves_the_earlier_report(ladder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    write_report(load_runs([ladder]), out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    append(ladder, entry(step=9999))
    with pytest.raises(BadRequestError, match=re.escape('pip install "tokenformer[report]"')):
        write_report(load_runs([ladder]), out)
    with pytest.raises(BadRequestError):
        write_report(load_runs([ladder]), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_runs_of_one_name_are_told_apart_by_the_folders_above(tmp_path):
    paths = [
        tmp_path / "a" / "x" / "run",
        tmp_path / "b" / "x" / "run",
        tmp_path / "b" / "y" / "run",
        tmp_path / "other",
    ]
    for path in paths:
        one_run(path, entry())
    assert [read.label for read in load_runs(paths)] == ["a/x/run", "b/x/run", "y/run", "other"]
    with pytest.raises(BadRequestError, match="was given 2 times"):
        load_runs([paths[0], paths[0] / ".." / "run"])


def test_long_curves_are_thinned_and_keep_their_extremes(tmp_path):
    losses = [5.0 - i / 10_000 for i in range(20_000)]
    losses[7_777], losses[11_111] = 50.0, 0.5
    read = load_run(one_run(tmp_path / "run", *(entry(step=i + 1, loss=loss) for i, loss in enumerate(losses))))
    kept = thin([(one.at, one.loss) for one in read.train])
    assert len(kept) <= MOST_POINTS
    values = [value for _, value in kept]
    assert {50.0, 0.5, losses[0], losses[-1]} <= set(values)
    steps = [at.step for at, _ in kept]
    assert steps == sorted(set(steps))


def test_numbers_have_three_digits_and_a_unit(tmp_path):
    assert [count(n) for n in (0, 512, 12_345, 999_600, 1.5e9, 123e6)] == [
        "0",
        "512",
        "12.3k",
        "1.00M",
        "1.50B",
        "123M",
    ]
    assert [flops(n) for n in (0, 4.56e15, 9.996e17)] == ["0 FLOPs", "4.56 PFLOPs", "1.00 EFLOPs"]
    axes = all_axes(load_runs([one_run(tmp_path / "run", entry(step=3))]))
    assert [axis.title for axis in axes] == ["training compute, MFLOPs", "training tokens", "training time, seconds"]


def test_the_command(ladder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("report", ladder)
    assert result.exit_code == 0, result.stderr
    assert "120 measurements, stages: 3" in result.stdout
    assert sorted(path.name for path in (ladder / "report").iterdir()) == NAMES
    write_run(tmp_path / "b" / "ladder", steps=100)
    assert run("report", "ladder", "b/ladder").exit_code == 0
    assert "b/ladder" in (tmp_path / "report" / "report.html").read_text()
    assert "Example: tokenformer report " in run("report", "--help").stdout


def test_the_example_in_the_docs(tmp_path, monkeypatch):
    write_run(tmp_path / "runs" / "ladder", steps=100)
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parent.parent / "docs" / "report.md").read_text()
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1), {})
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == NAMES


def test_the_commands_mistakes_are_one_line(tmp_path):
    ended(run("report", tmp_path / "none"), 2, "none does not exist")
    ended(run("report", tmp_path), 2, "has no metrics.jsonl")
    broken = one_run(tmp_path / "broken", '{"kind": "tr')
    ended(run("report", broken), 1, "metrics.jsonl has no line that can be read")
    with pytest.raises(BadFileError):
        load_run(broken)
    good = one_run(tmp_path / "good", entry())
    ended(run("report", good, "--out", good / "metrics.jsonl"), 2, "is not a folder")
    ended(run("report"), 2, "RUN")
