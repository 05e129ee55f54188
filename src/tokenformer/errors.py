"""Errors that speak to a person: what was given, what was expected, what to do, in one line."""

import difflib
from collections.abc import Iterable


class BadRequestError(ValueError):
    """The request cannot be carried out as it stands; nothing was changed. The message says what to do."""


class BadFileError(RuntimeError):
    """A file is broken, truncated or not of the expected form. The message names it."""


class BadResultError(RuntimeError):
    """What was done did not come out as it must. Nothing good was overwritten; the message says what is wrong."""


def one_line(message: object) -> str:
    """A message, often another library's, without its line breaks."""
    return " ".join(str(message).split())


def install(extra: str) -> str:
    """The end of an error message about what an extra of ours brings."""
    return f'install the extra: pip install -c constraints.txt -e ".[{extra}]", where tokenformer\'s source is'


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the nearest valid one, or all of them."""
    known = [str(name) for name in known]
    longer = [name for name in known if given and name.startswith(given)]
    near = longer or difflib.get_close_matches(given, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    shown = known if len(known) <= 12 else [*known[:12], f"… ({len(known)} in all)"]
    return f"choose one of {', '.join(shown)}"
