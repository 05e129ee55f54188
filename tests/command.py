"""Running the `tokenformer` command in this process, and what a failure of it looks like."""

from typer.testing import CliRunner

from tokenformer_cli import app


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def ended(result, code, *words):
    """The command ended with `code`, nothing on stdout and one line on stderr that has the words."""
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    assert result.stderr.endswith("\n")
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert str(word) in result.stderr, result.stderr
