"""Token groups that are part of a model: built with it from its configuration, so that their weights load like any.

Enters: a base model whose configuration has `token_groups`. Leaves: the same, with the groups beside its layers. Groups
that are saved apart are not in the configuration; see groups/.
"""

from typing import Any

from ..pattention import Pattention
from ..pattention.groups import Switch, TokenGroup, add_group


def put_kept_groups(model: Any) -> None:
    """Put the groups that the configuration names beside the layers of a base model. All of them are on."""
    entries, switch = model.config.token_groups or [], Switch()
    for entry in entries:
        for name, count in entry["layers"].items():
            layer = model.get_submodule(name)
            assert isinstance(layer, Pattention)
            group = TokenGroup(layer.d_in, layer.d_out, count, layer.kind, entry["norm"])
            add_group(layer, entry["name"], group, switch)
        if entry["merged"]:
            switch.merged = (*switch.merged, entry["name"])
        else:
            switch.on = (*switch.on, entry["name"])
