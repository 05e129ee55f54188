"""Refuses a mistyped key of a recipe at once, instead of after the seconds that importing torch takes.

Enters: the path of a recipe and overrides such as `training.seed=1`. Leaves: nothing, or a one-line error, the one that
the library would give. The keys are read from the source of the classes that declare them, ours and transformers',
without importing it. Whatever else may be wrong is left to the library, which checks everything again.
"""

import ast
import re
import runpy
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import yaml

from .terminal import BadCommandError

SECTIONS = ("name", "model", "data", "training", "growth")
# The files that declare keys, in their packages.
FILES = {
    "tokenformer": ("training/settings.py", "data/text/settings.py", "data/images/settings.py", "models/config.py"),
    "transformers": ("training_args.py", "configuration_utils.py"),
}
# By the place of a key: the classes that declare it, for text and for images.
CLASSES = {
    "model": (("_TextModel", "TokenFormerConfig"), ("_ImageModel", "TokenFormerVisionConfig")),
    "data": (("TextSettings",), ("ImageSettings",)),
    "data.augment": ((), ("AugmentSettings",)),
    "training": (("_TextTraining", "TrainingArguments"), ("_ImageTraining", "TrainingArguments")),
    "growth": (("GrowthSettings",), ("GrowthSettings",)),
    "growth.stages": (("TextStage",), ("ImageStage",)),
}
# A file longer than this is no recipe.
MOST_BYTES = 2**20


def check_keys(recipe: Path, overrides: Sequence[str]) -> None:
    """Refuse the first key that neither a recipe for text nor one for images has."""
    places = [*_in_file(recipe), *(_place(override) for override in overrides)]
    images = int(any(place[:2] == ["data", "images"] for place in places))
    known: dict[str, tuple[list[str], list[str]]] = {}
    decided: list[str] = []
    for place in places:
        for depth in range(1, len(place) + 1):
            parent, key = ".".join(place[: depth - 1]), _without_index(place[depth - 1])
            if not parent:
                names = (list(SECTIONS), list(SECTIONS))
            elif _without_index(parent) in CLASSES:
                if not known:
                    known, decided = all_keys()
                names = known[_without_index(parent)]
            else:
                break
            # Keys of the other kind of recipe, and those that the ladder decides, have errors of their own.
            if names[images] and key not in (*names[0], *names[1], *decided):
                where = f"{recipe}: {parent}: " if parent else f"{recipe}: "
                raise BadCommandError(f"{where}{key!r} is not known; {_did_you_mean(key, names[images])}")


def all_keys() -> tuple[dict[str, tuple[list[str], list[str]]], list[str]]:
    """By place, the keys that a recipe for text and one for images have there; and those that no recipe decides."""
    classes: dict[str, ast.ClassDef] = {}
    decided: list[str] = []
    for package, paths in FILES.items():
        spec = find_spec(package)  # which does not import it
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for path in paths:
                tree = ast.parse((Path(folder) / path).read_text(encoding="utf-8"))
                classes |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
                for node in tree.body:
                    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DECIDED":
                        decided += ast.literal_eval(node.value)

    def keys(names: Sequence[str]) -> list[str]:
        found = dict.fromkeys(key for name in names for key in _fields(name, classes))
        return [key for key in found if key not in decided]

    return {place: (keys(text), keys(images)) for place, (text, images) in CLASSES.items()}, decided


def _fields(name: str, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    """The annotated attributes of a class and of those that it is derived from."""
    node = classes.get(name)
    if node is None:
        return
    for base in node.bases:
        yield from _fields(ast.unparse(base), classes)
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and not ast.unparse(line.annotation).startswith("ClassVar"):
            yield ast.unparse(line.target)


def _in_file(recipe: Path) -> Iterator[list[str]]:
    """The places of all keys of a recipe; none if it cannot be read, which the library explains."""
    try:
        if not recipe.is_file():
            return
        with recipe.open("rb") as file:
            # As nodes: nothing that an alias stands for is built.
            yield from _in_node(yaml.compose(file.read(MOST_BYTES), yaml.SafeLoader), [])
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return


def _in_node(node: yaml.Node | None, place: list[str]) -> Iterator[list[str]]:
    if isinstance(node, yaml.SequenceNode) and place:
        # Each once, and no lists in lists: aliases can make a few lines stand for billions of values.
        seen: set[int] = set()
        for i, item in enumerate(node.value):
            if isinstance(item, yaml.MappingNode) and id(item) not in seen:
                seen.add(id(item))
                yield from _in_node(item, [*place[:-1], f"{place[-1]}[{i}]"])
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            # What is merged in (`<<: *other`) is checked where it stands.
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                yield [*place, key.value]
                if _without_index(".".join([*place, key.value])) in CLASSES:
                    yield from _in_node(value, [*place, key.value])


def _place(override: str) -> list[str]:
    """`growth.stages.0.steps=9` or `growth.stages[0].steps=9` names a key of growth.stages[0]."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", override.partition("=")[0]).split(".")


def _without_index(place: str) -> str:
    return re.sub(r"\[\d+\]", "", place)


def _did_you_mean(given: str, known: Iterable[str]) -> str:
    # The library's own words, from a file that needs nothing else: importing it would import all of the library.
    spec = find_spec("tokenformer")
    assert spec is not None
    return runpy.run_path(str(Path(str(spec.origin)).with_name("errors.py")))["did_you_mean"](given, known)
