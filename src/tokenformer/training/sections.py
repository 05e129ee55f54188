"""A section of a recipe to a dataclass: every key known, every value of its type.

Enters: what YAML gave. Leaves: an instance, or a one-line error that names the nearest valid key. omegaconf's own check
knows no `str | list`, and names none.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from ..errors import BadRequestError, did_you_mean


def check_known(section: Mapping[Any, Any], known: Iterable[str], where: str, elsewhere: Mapping[str, str]) -> None:
    """Refuse unknown keys. `elsewhere` has keys that are known in another kind of recipe, and says so."""
    known = list(known)
    for key in section:
        if key not in known:
            why = elsewhere.get(str(key), "is not known")
            raise BadRequestError(f"{where}: {key!r} {why}; {did_you_mean(str(key), known)}")


def structured(cls: Any, section: Mapping[str, Any], where: str, elsewhere: Mapping[str, str] | None = None) -> Any:
    """An instance of a dataclass, and of those in it, with the type of every value checked."""
    hints = get_type_hints(cls)
    check_known(section, hints, where, elsewhere or {})
    values = dict(section)
    for key, value in section.items():
        if is_dataclass(hints[key]) and isinstance(value, Mapping):
            values[key] = structured(hints[key], value, f"{where}.{key}")
        elif not fits(value, hints[key]):
            raise BadRequestError(f"{where}.{key} is {value!r}; {said(hints[key])} is needed")
    return cls(**values)


MANY = {str: "texts", float: "numbers"}
SAID = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}


def said(hint: Any) -> str:
    """How an error names a type. That a key may be left out goes without saying."""
    if _is_union(hint):
        return " or ".join(dict.fromkeys(said(choice) for choice in get_args(hint) if choice is not type(None)))
    if get_origin(hint) is list:
        return f"a list of {MANY.get(get_args(hint)[0], 'keys and values')}"
    return SAID.get(get_origin(hint) or hint, "a list of keys and values")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value read from YAML is of a type. A whole number will do for a float."""
    if _is_union(hint):
        return any(fits(value, choice) for choice in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(fits(item, get_args(hint)[0]) for item in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(fits(item, get_args(hint)[1]) for item in value.values())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    # Types that YAML has not, such as enumerations, are left to whoever takes them.
    return isinstance(value, hint) if hint in (str, bool, dict, list, type(None)) else True


def _is_union(hint: Any) -> bool:
    return isinstance(hint, UnionType) or get_origin(hint) is Union


class Loader(yaml.SafeLoader):
    """YAML that reads 6e-4 and 2e9 as numbers: the standard wants a point in them. A key stands there once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if key.value in seen:
                problem = f"the key {key.value!r} stands there twice"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*)(?:\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)
