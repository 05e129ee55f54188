"""Models of other families that have Pattentions in them: what config.json says of it, and how such a model loads.

Enters: a model of transformers, and the record of the modules that were replaced in it (adoption/). Leaves: the
same model with those modules in place, empty, for their weights to be loaded.

    import tokenformer
    AutoModelForCausalLM.from_pretrained("models/adopted")

transformers has one way for a library to replace modules between building a model and loading its weights: that of
quantised models. So the record stands under `quantization_config`, with the method "tokenformer". Nothing is
quantised, and once loaded the model is an ordinary one.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..errors import BadFileError, BadRequestError
from ..pattention import Pattention
from ..pattention.module import set_submodule

METHOD = "tokenformer"
# Of a layer's entry, what a Pattention is made from; the rest is for people.
SHAPE = ("d_in", "d_out", "num_tokens", "kind", "key_bias", "bias")


Module = TypeVar("Module", bound=nn.Module)


def fits_no_host(module: Module) -> Module:
    """Let a module be saved with something under the name of the host's weight that does not fit there.

    Where tokenformer is not imported, loading then fails, instead of leaving layers at random behind a warning.
    """
    module.weight = nn.Buffer(torch.empty(0))
    return module


class EqualLength(nn.Module):
    """LayerNorm (`centred`) or RMSNorm, without weights, whose rows all have the same length, √width.

    A norm divides by √(variance + eps), and leaves rows shorter than that by as much as eps counts. Here what is
    missing goes where the keys behind the norm do not look: LayerNorm's rows have a mean of zero, so it becomes their
    mean; RMSNorm's rows have no place for it, and get one channel more.
    """

    def __init__(self, width: int, eps: float, centred: bool) -> None:
        super().__init__()
        self.width, self.eps, self.centred = width, eps, centred
        fits_no_host(self)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.centred:
            # The mean square of these is variance + eps.
            rows = rows - rows.mean(-1, keepdim=True) + self.eps**0.5
            return F.rms_norm(rows, (self.width,), eps=0.0).to(x.dtype)
        rows = F.pad(rows, (0, 1), value=(self.width * self.eps) ** 0.5)
        length = (self.width / (self.width + 1)) ** 0.5
        return (F.rms_norm(rows, (self.width + 1,), eps=0.0) * length).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}, centred={self.centred}"


@register_quantization_config(METHOD)
class Adopted(QuantizationConfigMixin):
    """What was replaced in a model, by the names of the modules in its base model.

    layers: name -> d_in, d_out, num_tokens, kind, key_bias, bias; ballast, how many tokens only make up the norm;
        replaced, the numbers in the matrices that stood there; error, relative, as `adopt` measured it, or None.
    norms: name -> width, eps, centred of the EqualLength that stands there.
    removed: what a Pattention does along with its own place: identities stand there.
    ballast: how the norm is kept constant, see adoption/fold.py.
    growth: one entry a growth step: method, seed, noise.
    """

    def __init__(
        self,
        layers: dict[str, dict[str, Any]],
        norms: dict[str, dict[str, Any]],
        removed: list[str],
        ballast: str,
        growth: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        self.quant_method: Any = METHOD
        self.layers, self.norms, self.removed, self.ballast = layers, norms, removed, ballast
        self.growth = growth or []

    def put_into(self, model: PreTrainedModel) -> None:
        """Replace the modules of a model as the record says; the new layers are empty."""
        base = model.base_model
        if self.ballast == "single" and model.dtype == torch.float16:
            raise BadRequestError(
                "the model was adopted with ballast='single', whose large bias is beyond fp16; load it in bf16 or fp32"
            )
        try:
            for name, entry in self.layers.items():
                like = next(base.get_submodule(name).parameters())
                shape = {key: entry[key] for key in SHAPE}
                layer = Pattention(**shape, device=like.device, dtype=like.dtype)
                set_submodule(base, name, fits_no_host(layer))
            for name, settings in self.norms.items():
                base.get_submodule(name)
                set_submodule(base, name, EqualLength(**settings))
            for name in self.removed:
                set_submodule(base, name, nn.Identity())
                # Some hosts initialise a module by reaching into its parts (GPT-2 the second linear of its MLP).
                parent: Any = base.get_submodule(name.rpartition(".")[0])
                parent._is_hf_initialized = True
        except (AttributeError, KeyError, TypeError) as error:
            raise BadFileError(
                f"the record of adopted layers in config.json does not fit a {type(base).__name__}: {error}"
            ) from error
        forget_plans(model)

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a model in which other layers stand than the record says: it could not be kept up to date."""
        modules = dict(model.base_model.named_modules())
        for name in self.layers:
            if not isinstance(modules.get(name), Pattention):
                found = f"a {type(modules[name]).__name__}" if name in modules else "nothing"
                raise BadRequestError(f"grow: {name} was adopted, and {found} stands there now; put the layer back")

    def follow(self, model: PreTrainedModel, step: dict[str, Any]) -> None:
        """Bring the record up to date after a growth step."""
        for name, entry in self.layers.items():
            entry["num_tokens"] = model.base_model.get_submodule(name).num_tokens
        self.growth.append(step)


def record_of(config: Any) -> Adopted | None:
    """The record in a configuration, if it is that of an adopted model. In one that was just read it is a dict."""
    found = getattr(config, "quantization_config", None)
    if isinstance(found, dict) and found.get("quant_method") == METHOD:
        return Adopted.from_dict(found)
    return found if isinstance(found, Adopted) else None


def adopted_models(model: nn.Module) -> list[tuple[PreTrainedModel, Adopted]]:
    """The outermost adopted model within a module, with its record; there may be none, or several side by side."""
    found: dict[int, tuple[PreTrainedModel, Adopted]] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            record = record_of(module.config)
            if record is not None and id(module.config) not in found:
                found[id(module.config)] = (module, record)
    return list(found.values())


def forget_plans(model: PreTrainedModel) -> None:
    """Drop the plans for tensor parallelism, which name weights that are gone."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module._tp_plan, module._ep_plan = {}, {}


@register_quantizer(METHOD)
class AdoptedLoader(HfQuantizer):
    """transformers' hook: called with the model before its weights are loaded, and after."""

    quantization_config: Adopted

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self.quantization_config.put_into(model)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        # Nothing is quantised: without these traces the model casts, trains and compiles as any other.
        del model.hf_quantizer, model.quantization_method
        model.is_quantized = False
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.config.__dict__.pop("_is_quantized", None)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True
