"""What a transformers model with token groups can do besides: names of groups by row, and saving the groups alone.

    model(**batch, adapter_names=["law", "fr", "__base__"])
    model.generate(**batch, adapter_names=[…])
    model.save_pretrained(folder)      # the groups, as Trainer's checkpoints have them

Enters: a model of any class of transformers. Leaves: the same object, of a subclass of its class that has the methods
of transformers' own adapters under their names. Taken back when the last group goes.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..errors import BadRequestError
from ..models.kept_groups import WITH_METHODS, HasGroups, give_methods
from ..pattention.groups import Switch, switch_of
from .change import check_known, remove_tokens, rows_of, token_groups, tokens_by_row, use_tokens
from .files import load_tokens, save_groups

Rows = Sequence[str | Sequence[str]]
REFUSED = "token groups and peft's adapters do not go together; use tokenformer.add_tokens, or remove the groups first"


class ModelWithTokens(HasGroups, nn.Module):
    """Named before the model's own class."""

    @property
    def _hf_peft_config_loaded(self) -> bool:
        """Whether there are groups to be saved apart.

        Trainer trains a quantised model, and gives inputs a gradient under checkpointing, only if it has adapters.
        """
        return not all(facts.kept for facts in token_groups(self))

    def generate(self, *args: Any, adapter_names: Rows | None = None, **kwargs: Any) -> Any:
        """As transformers'; `adapter_names` are the groups of each row."""
        model: Any = self
        if adapter_names is None:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        config = kwargs.get("generation_config") or model.generation_config
        keys = ("num_beams", "num_return_sequences")
        copies = max(kwargs.get(key) or getattr(config, key, None) or 1 for key in keys)
        with tokens_by_row(model, [row for row in adapter_names for _ in range(copies)]):
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Write the groups that are on, each in a folder of its own if they are several; not the model.

        If all groups are part of the model, it is written with them.
        """
        if not self._hf_peft_config_loaded:
            super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
            return
        save_groups(self, save_directory, kwargs.get("state_dict"), write=kwargs.get("is_main_process", True))
        if kwargs.get("push_to_hub"):
            raise BadRequestError("save_pretrained: save the groups, and upload their folder: hf upload NAME FOLDER")

    def set_adapter(self, adapter_name: str | list[str]) -> None:
        """`tokenformer.use_tokens`."""
        use_tokens(self, adapter_name)

    def active_adapters(self) -> list[str]:
        """The groups that are on."""
        return list(_switch(self).on)

    def disable_adapters(self) -> None:
        """Switch all groups off until `enable_adapters`."""
        switch = _switch(self)
        switch.off, switch.on = switch.on or switch.off, ()

    def enable_adapters(self) -> None:
        """Switch those on again that `disable_adapters` switched off."""
        switch = _switch(self)
        switch.on, switch.off = switch.on or switch.off, ()

    def delete_adapter(self, adapter_names: str | Iterable[str]) -> None:
        """`tokenformer.remove_tokens`."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        check_known(self, names)
        for name in names:
            remove_tokens(self, name)

    def load_adapter(self, peft_model_id: str | os.PathLike, adapter_name: str | None = None, **kwargs: Any) -> None:
        """`tokenformer.load_tokens`."""
        load_tokens(self, peft_model_id, name=adapter_name, trainable=bool(kwargs.get("is_trainable")))

    def add_adapter(self, *_: Any, **__: Any) -> None:
        """Refused: peft's adapters and token groups do not go together."""
        raise BadRequestError(f"add_adapter: {REFUSED}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle finds classes by their names, and ours is made when it is needed.
        return _remade, (self.without_groups,), self.__dict__


@contextmanager
def switched_off(model: nn.Module, name: str) -> Iterator[None]:
    """Within the `with`, the model computes without one of its groups."""
    switch = _switch(model)
    before, switch.on = switch.on, tuple(one for one in switch.on if one != name)
    try:
        yield
    finally:
        switch.on = before


def _switch(model: Any) -> Switch:
    switch = switch_of(model)
    assert switch is not None
    return switch


def _remade(kind: type[PreTrainedModel]) -> PreTrainedModel:
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    give_methods(model)
    return model


@cache
def _with_tokens(kind: Any) -> Any:
    @wraps(kind.forward)  # Trainer reads from its signature which columns of a data set the model takes
    def forward(self: Any, *args: Any, adapter_names: Rows | None = None, **kwargs: Any) -> Any:
        switch = _switch(self)
        if adapter_names is not None:
            # They stay until the next call: with gradient checkpointing the backward pass computes blocks again.
            switch.set_rows(rows_of(self, adapter_names))
        elif switch.rows is not None and not switch.rows_stay:
            switch.set_rows(None)
        return kind.forward(self, *args, **kwargs)

    own = {"forward": forward, "without_groups": kind, "__module__": kind.__module__}
    return type(kind.__name__, (ModelWithTokens, kind), own)


WITH_METHODS.append(_with_tokens)
