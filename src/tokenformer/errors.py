"""Errors that speak to a person: what was given, what was expected, what to do, in one line."""

import difflib
from collections.abc import Iterable
from importlib.util import find_spec

# What each extra of pyproject.toml brings, as it is imported; tests/test_packaging.py compares the two.
EXTRAS = {
    "train": ("accelerate", "datasets", "pyarrow"),
    "vision": ("datasets", "pyarrow", "PIL", "kornia", "sklearn"),
    "eval": ("lm_eval", "datasets"),
    "report": ("matplotlib",),
    "serve": ("starlette", "uvicorn", "prometheus_client"),
    "triton": ("triton",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
}


class BadRequestError(ValueError):
    """The request cannot be carried out as it stands; nothing was changed. The message says what to do."""


class MissingExtraError(BadRequestError, ImportError):
    """What was asked for needs packages of an extra that is not installed. The message says how to install it."""


class BadFileError(RuntimeError):
    """A file is broken, truncated or not of the expected form. The message names it."""


class BadResultError(RuntimeError):
    """What was done did not come out as it must. Nothing good was overwritten; the message says what is wrong."""


def one_line(message: object) -> str:
    """A message, often another library's, without its line breaks; in words, if an error's own are none."""
    if isinstance(message, RecursionError):  # readers of JSON and YAML call themselves for every bracket
        return "its brackets are nested too deeply"
    if type(message) is KeyError and len(message.args) == 1:  # whose text is the key
        return f"it has no {message.args[0]!r}"
    said = " ".join(str(message).split())
    if not said and isinstance(message, BaseException):
        return "there is not enough memory" if isinstance(message, MemoryError) else type(message).__name__
    return said


def innermost(error: Exception) -> str:
    """The last sentence of an error that holds others, as those of transformers' strict configurations do."""
    return one_line(error).rpartition("Error: ")[2]


def shown(value: object, most: int = 200) -> str:
    """A value as an error repeats it, cut off where it is too long to be read."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def install(extra: str) -> str:
    """The end of an error message about what an extra of ours brings."""
    return f'install the extra: pip install "tokenformer[{extra}]"'


def require(what: str, extra: str, *modules: str) -> None:
    """Refuse `what` in one line unless the modules of an extra are installed: those that are named, or all of them."""
    missing = [module for module in modules or EXTRAS[extra] if find_spec(module) is None]
    if missing:
        is_or_are = "is" if len(missing) == 1 else "are"
        raise MissingExtraError(f"{what} needs {', '.join(missing)}, which {is_or_are} not installed; {install(extra)}")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the nearest valid one, or all of them."""
    known = [str(name) for name in known]
    longer = [name for name in known if given and name.startswith(given)]
    near = longer or difflib.get_close_matches(given, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    shown = known if len(known) <= 12 else [*known[:12], f"… ({len(known)} in all)"]
    return f"choose one of {', '.join(shown)}"
