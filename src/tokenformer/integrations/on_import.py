"""on_import(name, then): calls `then(module)` as soon as a module is imported; at once if it was imported before."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def on_import(name: str, then: Callable[[Any], None]) -> None:
    """Call `then` with the module called `name` once, after it has run."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watch(name, then))


class _Watch(MetaPathFinder):
    """Lets the other finders locate the module, and removes itself once it has run."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name, self.then = name, then
        self.looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or self.looking:
            return None
        self.looking = True  # the others are asked, not this one again
        try:
            spec = find_spec(fullname)
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_tell(module: ModuleType) -> None:
                run(module)
                sys.meta_path.remove(self)
                self.then(module)

            spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec
