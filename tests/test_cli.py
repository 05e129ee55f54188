"""The `tokenformer` command: what it prints, how it ends, and that a user's mistake is one line."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import tokenformer
from command import ended, run
from conftest import make_tiny
from official_files import ROWS, fail_after_saving, write_official, write_tokenizer
from tokenformer import grow
from tokenformer_cli import app

COMMANDS = tuple(get_command(app).commands)


@pytest.fixture
def official(tmp_path):
    return write_official(tmp_path, dtype=torch.float16)


def test_version_and_help():
    assert run("--version").stdout == f"tokenformer {tokenformer.__version__}\n"
    for arguments in (("--help",), ("-h",), ()):
        result = run(*arguments)
        assert result.exit_code == 0
        assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: tokenformer {command} " in result.stdout


def test_import_and_export(tmp_path, official):
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", 30)
    result = run("import-official", *official, tmp_path / "model", "--tokenizer", tokenizer)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    assert lines[0] == ["Imported"]
    assert dict(lines[1:]) == {
        "parameters": "11,376",
        "dtype": "float16",
        "tokens": "qkv 5, out 7, ffn 11",
        "vocabulary": f"{ROWS} rows: 30 used, {ROWS - 30} padding",
        "written": str(tmp_path / "model"),
    }
    result = run("export-official", tmp_path / "model", tmp_path / "back.bin", tmp_path / "back.yml")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert f"written     {tmp_path / 'back.bin'}, {tmp_path / 'back.yml'}\n" in result.stdout
    assert f"vocabulary  {ROWS} rows\n" in result.stdout


def test_bad_requests_end_with_2(tmp_path, official):
    checkpoint, config = official
    out = tmp_path / "model"
    grow(make_tiny(), 2, method="zero").save_pretrained(tmp_path / "grown")
    ended(run("import-official", checkpoint, tmp_path / "no.yml", out), 2, "error: ", "no.yml does not exist")
    ended(run("import-official", checkpoint, config, tmp_path), 2, tmp_path, "would be overwritten")
    ended(run("export-official", tmp_path / "grown", tmp_path / "a", tmp_path / "b"), 2, "grown", "tau 8")
    config.write_text(config.read_text().replace("rotary", "learned", 1))
    ended(run("import-official", checkpoint, config, out), 2, "official.yml: pos_emb is 'learned'")
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["import-oficial"],
            ["No such command 'import-oficial'. Did you mean 'import-official'", "See tokenformer --help."],
        ),
        (
            ["import-official", "a", "b"],
            ["Missing argument 'OUT_DIR'.", "See tokenformer import-official --help."],
        ),
        (["import-official", "--tokeniser", "a"], ["No such option: --tokeniser"]),
        (
            ["export-official", "a", "b", "c", "d"],
            ["unexpected extra argument", "See tokenformer export-official --help."],
        ),
        (["--verbose"], ["No such option: --verbose", "See tokenformer --help."]),
        (["info", "--length", "abc"], ["Invalid value for '--length'", "; 'abc' was given. See tokenformer info"]),
        (["info", "--length", "0"], ["greater than or equal to 1; '0' was given."]),
    ],
)
def test_mistakes_in_the_command_line_end_with_2(arguments, words):
    ended(run(*arguments), 2, "error: ", *words)


def test_broken_files_end_with_1(tmp_path, official):
    checkpoint, config = official
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    ended(run("import-official", checkpoint, config, tmp_path / "m"), 1, "error: ", checkpoint, "truncated")
    config.write_text("- a\n- list")
    ended(run("import-official", checkpoint, config, tmp_path / "m"), 1, "error: ", config, "holds a list")
    assert not (tmp_path / "m").exists()


def test_debug_shows_the_traceback(tmp_path, official):
    result = run("--debug", "import-official", official[0], tmp_path / "no.yml", tmp_path / "m")
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_unforeseen_errors_end_with_1_and_a_hint(tmp_path, official, monkeypatch):
    fail_after_saving(monkeypatch, LookupError("a surprise\nin two lines"))
    arguments = ("import-official", *official, tmp_path / "m")
    ended(run(*arguments), 1, "error: LookupError: ", "a surprise in two lines", "--debug")
    assert "in save_and_fail" in run("--debug", *arguments).stderr
    assert not (tmp_path / "m").exists()


def test_ctrl_c_ends_with_130(tmp_path, official, monkeypatch):
    fail_after_saving(monkeypatch, KeyboardInterrupt())
    before = sorted(tmp_path.iterdir())
    ended(run("import-official", *official, tmp_path / "m"), 130, "interrupted")
    assert sorted(tmp_path.iterdir()) == before


def test_as_a_program(tmp_path, official):
    """The installed script, and `python -m`, with their output in a pipe as in a log file."""
    script = Path(sys.executable).with_name("tokenformer")
    done = subprocess.run(
        [script, "import-official", *official, tmp_path / "model"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "\x1b" not in done.stdout
    assert f"written     {tmp_path / 'model'}\n" in done.stdout
    again = subprocess.run(
        [sys.executable, "-m", "tokenformer", "import-official", *official, tmp_path / "model"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == f"error: {tmp_path / 'model'} exists already and would be overwritten; choose a new name\n"


def test_parts_need_no_import_of_their_own():
    asked = "import tokenformer as t; print(t.cost.parameters.__name__, t.evaluation.__name__, hasattr(t, 'nothing'))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert done.stdout == "parameters tokenformer.evaluation False\n", done.stderr
