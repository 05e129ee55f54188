"""What no request can change about a model: refused in one line before anything else is looked at."""

from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import BadRequestError
from ..models import growth_records
from ..pattention import pattention_layers
from ..pattention.groups import layers_with_groups
from .step import APPENDING, REARRANGING


def check_growable(model: nn.Module, method: str) -> None:
    """Refuse what no request can change: adapters on tokens, shards, shared tokens, records that do not fit."""
    verb = method if method in REARRANGING else "grow"
    check_tokens(model, verb)
    _check_quantised(model, method, verb)
    for name, groups in layers_with_groups(model):
        shared = [group for group in groups.names() if groups[group].norm == "shared"]
        if shared and method not in ("zero", "sort"):
            way_out = "" if method == "shrink" else ", or use method='zero'"
            raise BadRequestError(
                f"{verb}: the token group {shared[0]!r} shares the normaliser of {name}, which {method} changes; merge "
                f"it first (merge_tokens){way_out}"
            )
    for part, record in growth_records(model):
        record.check_growth(part, method)


def _check_quantised(model: nn.Module, method: str, verb: str) -> None:
    """Refuse what would round quantised tokens again, or lose some of them."""
    name = next((name for name, layer in pattention_layers(model) if layer.num_quantised), None)
    if name is None or method in APPENDING:
        return
    way_out = "use method='zero' or 'rotate', or as_group" if method == "split" else f"{verb} first, then quantize"
    raise BadRequestError(
        f"{verb}: {name} is quantised, and {method} changes old tokens; {way_out}, or tokenformer.dequantize(model) "
        "before"
    )


def check_tokens(model: nn.Module, verb: str) -> None:
    """Refuse tokens that are not simply a layer's own: under an adapter, sharded, quantised, shared."""
    owners: dict[int, str] = {}
    for name, layer in pattention_layers(model):
        if name.endswith(".base_layer"):  # peft's name for what it wraps; its own matrices would not grow
            raise BadRequestError(
                f"{verb}: {name.partition('.base_layer')[0]} has an adapter on its tokens; merge it first "
                f"(merge_and_unload), or {verb} the model without it"
            )
        for key, tokens in layer.named_parameters(recurse=False):
            if isinstance(tokens, DTensor):
                raise BadRequestError(
                    f"{verb}: {name}.{key} is sharded over devices; {verb} the full model or a checkpoint of it"
                )
            if type(tokens) is not nn.Parameter:  # a quantiser's own class
                raise BadRequestError(
                    f"{verb}: {name}.{key} is quantised ({type(tokens).__name__}); {verb} first, then quantise"
                )
            owner = owners.setdefault(id(tokens), name)
            if owner != name:
                raise BadRequestError(f"{verb}: {name}.{key} is shared with {owner}; untie them first")
