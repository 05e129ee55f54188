"""Lists in docstrings, for the reference: a paragraph of lines such as `seed: decides the order` becomes a list.

Enters: the objects that mkdocstrings has read from the source. Leaves: their docstrings, with such lines as items.
zensical.toml names this file.
"""

import re

import griffe

FIELD = re.compile(r"^(?=[a-z]\w*(, [a-z]\w*)*: )", re.MULTILINE)


class ListsOfFields(griffe.Extension):
    """In what griffe takes for plain text; sections such as `Args:` are lists already."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is None:
            return
        paragraphs = obj.docstring.value.split("\n\n")
        for number, text in enumerate(paragraphs):
            if FIELD.match(text):
                paragraphs[number] = FIELD.sub("- ", text)
        obj.docstring.value = "\n\n".join(paragraphs)
