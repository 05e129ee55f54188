"""The text of a recipe as plain values: YAML, with `section.key=value` from the command line put in.

Enters: a file that anyone may have written. Leaves: dictionaries, lists, strings and numbers, not too many of them, and
nothing that is not in the file: ${…} is refused.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from ..errors import BadFileError, BadRequestError, one_line, shown

# More than any recipe has. Aliases can make a few lines stand for billions of values.
MOST_BYTES, MOST_VALUES = 2**20, 100_000


def read_values(path: Path) -> dict[Any, Any]:
    """What a file holds."""
    if path.exists() and not path.is_file() and not path.is_dir():  # a pipe may never end
        raise BadRequestError(f"{path} is neither a file nor a folder; give the path of a recipe")
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise BadFileError(f"{path} is not a recipe: it has more than {MOST_BYTES:,} bytes")
        values = yaml.load(content.decode(), Loader)
    except FileNotFoundError:
        raise BadRequestError(f"{path} does not exist; give the path of a recipe, such as recipes/demo.yaml") from None
    except IsADirectoryError:
        raise BadRequestError(f"{path} is a folder; give the path of a recipe, such as recipes/demo.yaml") from None
    except RecursionError:
        raise BadFileError(f"{path} is not a readable recipe: its brackets are nested too deeply") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BadFileError(f"{path} is not a readable recipe: {one_line(error)}") from error
    if not isinstance(values, dict):
        raise BadFileError(f"{path} holds no sections; a recipe has model, data, training and growth")
    return values


def override(values: dict[Any, Any], overrides: Iterable[str], path: Path) -> dict[Any, Any]:
    """The values of the file `path` with every `section.key=value` put in; growth.stages.1 is the second of a list."""
    for given in overrides:
        key, equals, text = given.partition("=")
        if not equals or not re.fullmatch(r"[\w.\[\]]+", key):
            raise BadRequestError(f"{given!r} is not an override; write section.key=value, as training.seed=1")
        if not text:
            raise BadRequestError(f"{given} has no value; write {given}null for the default")
        try:
            value = yaml.load(text, Loader)
        except RecursionError:
            raise BadRequestError(f"{shown(given)} cannot be read: its brackets are nested too deeply") from None
        except (ValueError, yaml.YAMLError) as error:
            raise BadRequestError(f"{shown(given)} cannot be read: {one_line(error)}") from error
        try:
            values = _with(values, re.findall(r"\w+", key), value)
        except IndexError:
            raise BadRequestError(f"{path}: {key} is beyond the end of that list, which counts from 0") from None
        except (TypeError, ValueError):
            raise BadRequestError(
                f"{path}: {key} cannot be set: part of that path is neither a section nor a list"
            ) from None
    return values


def _with(inside: Any, key: list[str], value: Any) -> Any:
    """A copy of nested dictionaries and lists with one value replaced: others may share what is inside, by an alias."""
    if not key:
        return value
    if isinstance(inside, list):
        copy, place = list(inside), int(key[0])
        copy[place] = _with(inside[place], key[1:], value)
        return copy
    return {**(inside or {}), key[0]: _with((inside or {}).get(key[0]), key[1:], value)}


class Loader(yaml.SafeLoader):
    """YAML that reads 6e-4 and 2e9 as numbers, for which the standard wants a point, and takes a key once only.

    What aliases stand for is counted before it is built. ${…}, with which other tools read the environment and call
    functions, is refused, so that no one takes it for granted.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _count(node, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"its aliases stand for more than {MOST_VALUES:,} values")
        return node

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if "${" in value:
            where = f"line {node.start_mark.line + 1}"
            raise yaml.YAMLError(f"{where}: {shown(value)} is not expanded; write the value itself")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if key.value in seen:
                problem = f"the key {key.value!r} is defined twice"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*)(?:\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def _count(node: yaml.Node, counted: dict[int, int | None]) -> int:
    """The values that a node stands for; one that several aliases share counts as often as it is used."""
    if id(node) in counted:
        known = counted[id(node)]
        if known is None:
            raise yaml.YAMLError("an alias stands for something that contains it")
        return known
    counted[id(node)] = None  # not known yet: whoever asks for it now is inside of it
    inner = node.value if isinstance(node, yaml.CollectionNode) else []
    parts = [part for item in inner for part in (item if isinstance(item, tuple) else (item,))]
    counted[id(node)] = total = 1 + sum(_count(part, counted) for part in parts)
    return total
