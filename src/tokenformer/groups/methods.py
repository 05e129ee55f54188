"""What a model with token groups can do besides: take names of groups by row, and, if it is one of transformers, have
the methods of transformers' own adapters under their names.

    model(**batch, adapter_names=["law", "fr", "__base__"])
    model.generate(**batch, adapter_names=[…])      # or "auto"
    model.save_pretrained(folder)                   # the groups, as Trainer's checkpoints have them

Enters: a model whose first group has come, or whose last one has gone. Leaves: the same object, with hooks; a model of
transformers is then of a subclass of its class.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import BadRequestError
from ..models.kept_groups import GROUP_METHODS, GroupMethods
from ..pattention.groups import Switch, switch_of
from .change import check_known, remove_tokens, token_groups, train_tokens, use_tokens
from .files import group_tensors, load_tokens, save_groups
from .rows import CallsByRow, Rows, calls_of, check_count, choose_tokens, rows_that_multiply

REFUSED = "token groups and peft's adapters do not go together; use tokenformer.add_tokens, or remove the groups first"


class ModelWithTokens(nn.Module):
    """The methods. They stand before those of the model's own class."""

    without_groups: ClassVar[Any]  # that class

    @property
    def _hf_peft_config_loaded(self) -> bool:
        """Whether there are groups to be saved apart.

        Trainer trains a quantised model, and gives inputs a gradient under checkpointing, only if it has adapters.
        """
        return not all(facts.kept for facts in token_groups(self))

    def generate(self, *args: Any, adapter_names: Rows | str | None = None, **kwargs: Any) -> Any:
        """As transformers'; `adapter_names` are the groups of each row, or "auto" for those that suit the prompts."""
        if adapter_names is None:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        if isinstance(adapter_names, str):
            adapter_names = self._chosen(adapter_names, args, kwargs)
        check_count(adapter_names, args, kwargs)
        with rows_that_multiply(self, adapter_names):
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _chosen(self, how: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        if how != "auto":
            raise BadRequestError(f"generate: adapter_names={how!r} was given; give a list with a name for every row")
        prompts = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
        if not isinstance(prompts, Tensor):
            raise BadRequestError("generate: adapter_names='auto' needs input_ids, by which it chooses")
        return choose_tokens(self, prompts, attention_mask=kwargs.get("attention_mask"))

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Write the group that learns, or those that are on, each in a folder of its own if they are several.

        Not the model, unless all groups are part of it.
        """
        if not self._hf_peft_config_loaded:
            super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
            return
        save_groups(
            self,
            save_directory,
            kwargs.get("state_dict"),
            write=kwargs.get("is_main_process", True),
            push_to_hub=bool(kwargs.get("push_to_hub")),
        )

    def set_adapter(self, adapter_name: str | list[str]) -> None:
        """`tokenformer.use_tokens`; a single one learns from then on if another group did."""
        use_tokens(self, adapter_name)
        names = [adapter_name] if isinstance(adapter_name, str) else adapter_name
        if len(names) == 1 and any(facts.trains for facts in token_groups(self)):
            train_tokens(self, names[0])

    def active_adapters(self) -> list[str]:
        """The groups that are on."""
        return list(_switch(self).on)

    def disable_adapters(self) -> None:
        """Switch all groups off until `enable_adapters`."""
        switch = _switch(self)
        switch.was_on, switch.on = switch.on or switch.was_on, ()

    def enable_adapters(self) -> None:
        """Switch those on again that `disable_adapters` switched off."""
        switch = _switch(self)
        switch.turn_on(*switch.was_on)
        switch.was_on = ()

    def delete_adapter(self, adapter_names: str | Iterable[str]) -> None:
        """`tokenformer.remove_tokens`."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        check_known(self, names)
        for name in names:
            remove_tokens(self, name)

    def load_adapter(
        self, peft_model_id: str | os.PathLike | None, adapter_name: str | None = None, **kwargs: Any
    ) -> None:
        """`tokenformer.load_tokens`."""
        if peft_model_id is None:
            raise BadRequestError("load_adapter: a folder of a token group is needed, and None was given")
        load_tokens(self, peft_model_id, name=adapter_name, trainable=bool(kwargs.get("is_trainable")))

    def get_adapter_state_dict(self, adapter_name: str | None = None, **_: Any) -> dict[str, Tensor]:
        """The tensors of one group, the first that is on unless it is named."""
        name = adapter_name or next(iter(_switch(self).on), None)
        if name is None:
            raise BadRequestError("get_adapter_state_dict: no token group is on; name one")
        check_known(self, [name])
        return group_tensors(self, name)

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


def _switch(model: nn.Module) -> Switch:
    switch = switch_of(model)
    assert switch is not None
    return switch


def _give(model: nn.Module) -> None:
    if calls_of(model) is None:
        CallsByRow(_switch(model)).put_on(model)
    _of_subclass(model)


def _of_subclass(model: nn.Module) -> None:
    kind: Any = type(model)
    if isinstance(model, PreTrainedModel) and not isinstance(model, ModelWithTokens):
        model.__class__ = _with_methods(kind)


def _take(model: nn.Module) -> None:
    for part in model.modules():  # one that was built with its groups has the methods in its base model too
        calls = calls_of(part)
        if calls is not None:
            calls.take_off(part)
        if isinstance(part, ModelWithTokens):
            part.__class__ = part.without_groups


def _remade(kind: type[PreTrainedModel]) -> PreTrainedModel:
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    _of_subclass(model)
    return model


@cache
def _with_methods(kind: Any) -> Any:
    return type(kind.__name__, (ModelWithTokens, kind), {"without_groups": kind, "__module__": kind.__module__})


GROUP_METHODS.append(GroupMethods(_give, _take))
