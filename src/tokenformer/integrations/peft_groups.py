"""peft and transformers say what a token group is when they find one in place of an adapter, and how it is loaded.

    AutoModel.from_pretrained("adapters/law"), PeftModel.from_pretrained(model, "adapters/law"), model.load_adapter(…)

Enters: peft's table of kinds of adapters (the module peft.mapping). Leaves: the same table, with an entry for the kind
that the adapter_config.json of a token group names.
"""

from typing import Any, NoReturn

from ..errors import BadRequestError
from ..groups.reading import TYPE


class TokenGroupConfig:
    """Where peft expects a configuration of an adapter: refuses to be one."""

    def __init__(self, name: str = "this", **_: Any) -> None:
        _refuse(repr(name), "FOLDER")

    @classmethod
    def from_pretrained(cls, folder: Any, **_: Any) -> NoReturn:
        """As that of peft's configurations."""
        _refuse(str(folder), repr(str(folder)))


def _refuse(what: str, folder: str) -> NoReturn:
    raise BadRequestError(
        f"{what} is a token group and not an adapter of peft; load the model that it belongs to, and then "
        f"tokenformer.load_tokens(model, {folder})"
    )


def name_groups(mapping: Any) -> None:
    """Let peft know the kind. A peft without the table goes on as it did."""
    getattr(mapping, "PEFT_TYPE_TO_CONFIG_MAPPING", {}).setdefault(TYPE, TokenGroupConfig)
