"""Settings that check themselves: the sections of a recipe, declared as pydantic models.

Enters: what a user wrote. Leaves: an instance of a Section, or a one-line error that says where, what was given, what
is needed and, for a misspelt key, the nearest one. Types are strict: text is never taken for a number. A whole number
is accepted where any number is, and 2e3 where a whole one is.
"""

import os
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import annotated_types as limits
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from typing_extensions import Self

from .errors import BadRequestError, did_you_mean, shown


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Numbers within bounds. An error names the bounds.
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
CountFromZero = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Text = Annotated[str, Field(min_length=1, pattern=r"\S")]  # spaces alone are no name
Processes = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=256)]
ProcessesFromZero = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=256)]


class Section(BaseModel):
    """A mapping of settings."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise BadRequestError(_explain(error, type(self), "")) from error

    # Otherwise pydantic would call it for nested sections too, and their errors would lack the path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _as_yaml(cls, values: Any) -> Any:
        """From Python, tuples will do for lists, and paths for text."""
        return {key: _plain(value) for key, value in values.items()} if isinstance(values, dict) else values

    @classmethod
    def read(cls, values: Any, where: str) -> Self:
        """From what YAML gave; `where` begins every error, as in `recipe.yaml: data`."""
        if not isinstance(values, Mapping):
            raise BadRequestError(f"{where} is {shown(values)}; a section holds keys and values")
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise BadRequestError(_explain(error, cls, where)) from error

    @classmethod
    def keys_of_other_recipes(cls) -> Mapping[str, str]:
        """Keys that only another kind of recipe has, and what an error says of them."""
        return {}

    @classmethod
    def unknown_key_message(cls, key: str, where: str) -> str:
        """What an error says of a key that the section does not have. `where` names the section, if it has a name."""
        reason = cls.keys_of_other_recipes().get(key)
        if reason is not None:
            return f"{where}.{key} {reason}" if where else f"{key} {reason}"
        unknown = f"{key!r} is not known; {did_you_mean(key, cls.model_fields)}"
        return f"{where}: {unknown}" if where else unknown


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _explain(error: ValidationError, section: type[Section], where: str) -> str:
    """The first thing that is wrong, in one line. Unknown keys come first: a misspelt one often causes the rest."""
    first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    name, annotation = where, cast(Any, section)
    bounds: list[str] = []
    for part in first["loc"]:
        if _is_union(annotation) and "[" in str(part):  # pydantic's name for one of the choices, such as dict[str,any]
            break
        item = _item(annotation, dict if isinstance(part, str) else list)
        if item is not None:
            name, annotation, bounds = f"{name}[{part!r}]", item, _bounds(item, [])
            continue
        holder = _section_in(annotation)
        if holder is None:  # what is left names the choices of a union
            break
        key = str(part)
        field = holder.model_fields.get(key)
        if field is None:
            return holder.unknown_key_message(key, name)
        name = f"{name}.{key}" if name else key
        annotation, bounds = field.annotation, _bounds(field.annotation, field.metadata)
    if first["type"] == "value_error":
        said = str(first["ctx"]["error"])
        return f"{name}: {said}" if name else said
    given, choices = first["input"], _choices(annotation)
    if choices and str(given) not in choices:
        needed = did_you_mean(str(given), choices)
    else:
        kind = "a finite number" if first["type"] == "finite_number" else _kind(annotation)
        needed = f"{' '.join([kind, *bounds])} is needed"
    return f"{name} is {shown(given)}; {needed}"


def _section_in(annotation: Any) -> type[Section] | None:
    """The section that a value of this type is, if it is one."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    choices = get_args(annotation) if _is_union(annotation) else ()
    return next((found for choice in choices if (found := _section_in(choice))), None)


def _item(annotation: Any, container: type) -> Any:
    """The type of the items of a list, or of the values of a dict; None if it is neither."""
    for choice in get_args(annotation) if _is_union(annotation) else [annotation]:
        plain = get_args(choice)[0] if get_origin(choice) is Annotated else choice
        if get_origin(plain) is container:
            return get_args(plain)[-1]
    return None


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [found for choice in get_args(annotation) for found in _choices(choice)] if _is_union(annotation) else []


KINDS_OF_VALUES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
KINDS_OF_ITEMS = {int: "whole numbers", float: "numbers", str: "texts"}


def _kind(annotation: Any) -> str:
    """How an error names a type. That a key may be left out goes without saying."""
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if _is_union(annotation):
        choices = (choice for choice in get_args(annotation) if choice is not type(None))
        return " or ".join(dict.fromkeys(_kind(choice) for choice in choices))
    if get_origin(annotation) is Literal:
        return KINDS_OF_VALUES[type(get_args(annotation)[0])]
    if get_origin(annotation) is list:
        item = get_args(annotation)[0]
        return "a list of stages" if _section_in(item) else f"a list of {KINDS_OF_ITEMS.get(item, 'values')}"
    return KINDS_OF_VALUES.get(annotation, "a list of keys and values")


def _bounds(annotation: Any, metadata: list[Any]) -> list[str]:
    """How an error names the bounds of a number. Those of `Count | None` are kept within the union."""
    within = [item for choice in (annotation, *get_args(annotation)) for item in getattr(choice, "__metadata__", ())]
    unpacked = [bound for item in within for bound in (item.metadata if isinstance(item, FieldInfo) else [item])]
    words = {
        limits.Ge: "of at least {.ge}",
        limits.Gt: "above {.gt}",
        limits.Le: "and at most {.le}",
        limits.Lt: "and below {.lt}",
        limits.MinLen: "that is not empty",
    }
    found = {type(bound): bound for bound in [*metadata, *unpacked]}
    return [said.format(found[kind]) for kind, said in words.items() if kind in found]


def _is_union(annotation: Any) -> bool:
    return isinstance(annotation, UnionType) or get_origin(annotation) is Union
