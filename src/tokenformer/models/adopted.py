"""Models of other families with Pattentions in them: the record of what was replaced, and the parts that replace it.

Enters: a transformers model, and the record of the modules that were replaced in it (adoption/). Leaves: the
same model with those modules in place, empty, for their weights to be loaded. adopted_classes.py has the classes that
load such models; their configuration holds the record as `config.adopted`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..errors import BadFileError, BadRequestError, did_you_mean
from ..pattention import Pattention
from ..pattention.module import set_submodule
from .blocks import BlockGrowth, Blocks, host_blocks, record_depth
from .config import TokenFormerBaseConfig

# Where config.json of version 0.1 has the record: in `quantization_config`, under this method of quantisation.
OLD_METHOD = "tokenformer"
# The forms of ballast: adoption/fold.py.
BALLASTS = ("spread", "single")
# The part of a layer's entry that a Pattention is made from; the rest is for people to read.
SHAPE = ("d_in", "d_out", "num_tokens", "kind", "key_bias", "bias")


Module = TypeVar("Module", bound=nn.Module)


def fits_no_host(module: Module, size: int = 1) -> Module:
    """Give a module a buffer with the name of the host's weight, and a shape that does not fit it.

    Loading into the host's own class then fails, instead of drawing layers at random with no more than a warning.
    """
    # Not empty: accelerate takes tensors without storage for shared ones, and saves only the first of them.
    module.weight = nn.Buffer(torch.zeros(size))
    return module


class EqualLength(nn.Module):
    """LayerNorm (`centred`) or RMSNorm, without weights, whose rows all have the same length, √width.

    A norm divides by √(variance + eps), so eps leaves its rows a little too short. Here what is missing goes where the
    keys that follow the norm do not look: LayerNorm's rows have a mean of zero, so it becomes their
    mean; RMSNorm's rows have no room for it, and get one more channel.
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


@dataclass
class Adopted:
    """What was replaced in a model, by the names of the modules in its base model.

    layers: name -> d_in, d_out, num_tokens, kind, key_bias, bias; ballast, how many tokens only keep the norm
        constant; replaced, how many numbers the replaced matrices had; error, the relative one if `adopt` measured it.
    norms: name -> width, eps, centred of the EqualLength that replaced it.
    removed: modules whose work a Pattention does as well, each replaced by an identity.
    ballast: how the norm is kept constant, see adoption/fold.py.
    growth: one entry per growth step: method, seed, noise; of growth in depth, blocks.
    """

    layers: dict[str, dict[str, Any]]
    norms: dict[str, dict[str, Any]]
    removed: list[str]
    ballast: str
    growth: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def from_dict(cls, entries: dict[str, Any]) -> "Adopted":
        """The record in a config.json; what else the entry there says is not for us."""
        try:
            found = cls(**{key: value for key, value in entries.items() if key in cls.__dataclass_fields__})
            found._check_types()
            return found
        except (TypeError, AttributeError, KeyError) as error:
            raise BadFileError(f"the record of adopted layers in config.json cannot be read: {error}") from error

    def _check_types(self) -> None:
        """Refuse a damaged record."""
        for entry in self.layers.values():
            sizes = [entry[key] for key in ("d_in", "d_out", "num_tokens") if key in entry]
            if not all(isinstance(size, int) for size in sizes):
                raise TypeError(f"a layer's sizes are {sizes}; whole numbers are needed")
        if not isinstance(self.norms, dict) or not isinstance(self.removed, list):
            raise TypeError("norms is not a mapping, or removed is not a list")
        if self.ballast not in BALLASTS:
            raise TypeError(f"ballast is {self.ballast!r}; {did_you_mean(str(self.ballast), BALLASTS)}")
        if not all(isinstance(step, dict) and "method" in step for step in self.growth):
            raise TypeError("a growth step has no method")

    def to_dict(self) -> dict[str, Any]:
        """The record for a config.json."""
        return asdict(self)

    def put_into(self, model: PreTrainedModel, guard: int = 1) -> None:
        """Replace the modules of a model as the record says; the new layers are empty.

        `guard` is the size of what keeps their weights from being loaded into the host: see `fits_no_host`.
        """
        base = model.base_model
        if self.ballast == "single" and model.dtype == torch.float16:
            raise BadRequestError(
                "the model was adopted with ballast='single', whose large bias is beyond fp16; load it in bf16 or fp32"
            )
        try:
            for name, entry in self.layers.items():
                like = next(base.get_submodule(name).parameters())
                shape = {key: entry[key] for key in SHAPE}
                # On the meta device nothing is said: who puts parameters alone there, as vLLM does, wants tau computed.
                device = None if like.is_meta else like.device
                layer = Pattention(**shape, device=device, dtype=like.dtype)
                set_submodule(base, name, fits_no_host(layer, guard))
            for name, settings in self.norms.items():
                base.get_submodule(name)
                set_submodule(base, name, fits_no_host(EqualLength(**settings), guard))
            for name in self.removed:
                set_submodule(base, name, nn.Identity())
                # Some hosts initialise a module by reaching into its parts: GPT-2 into the second linear of its MLP.
                parent: Any = base.get_submodule(name.rpartition(".")[0])
                parent._is_hf_initialized = True
        except (AttributeError, KeyError, TypeError) as error:
            raise BadFileError(
                f"the record of adopted layers in config.json does not fit a {type(base).__name__}: {error}"
            ) from error
        forget_plans(model)

    @property
    def growth_method(self) -> str:
        """The exact way to grow that trains best."""
        return "split" if self.ballast == "single" else "rotate"

    @property
    def growth_history(self) -> list[dict[str, Any]]:
        return self.growth

    def check_growth(self, model: PreTrainedModel, method: str) -> None:
        """Refuse a method that is not for this model, and a model whose layers are no longer those of the record."""
        check_ballast_grows(self.ballast, method)
        modules = dict(model.base_model.named_modules())
        for name in self.layers:
            if not isinstance(modules.get(name), Pattention):
                found = f"a {type(modules[name]).__name__}" if name in modules else "nothing"
                raise BadRequestError(f"grow: {name} was adopted, and {found} is in its place now; put the layer back")

    def record_growth(self, model: PreTrainedModel, step: dict[str, Any]) -> None:
        """Note a growth step of `model`, its new token counts and its depth."""
        if "blocks" in step:
            growth, stack = BlockGrowth(**step["blocks"]), host_blocks(model.config).stack
            record_depth(model.config, growth)
            self.layers = {name: dict(self.layers[old]) for name, old in _moved(self.layers, stack, growth)}
            self.norms = {name: dict(self.norms[old]) for name, old in _moved(self.norms, stack, growth)}
            self.removed = [name for name, _ in _moved(self.removed, stack, growth)]
        for name, entry in self.layers.items():
            entry["num_tokens"] = model.base_model.get_submodule(name).num_tokens
        self.growth.append(step)


def _moved(names: Iterable[str], stack: str, growth: BlockGrowth) -> Iterator[tuple[str, str]]:
    """After growth in depth: the names of modules that have become of these, each with the one it came from."""
    for name in names:
        block, _, rest = name.removeprefix(f"{stack}.").partition(".")
        if not name.startswith(f"{stack}."):
            yield name, name
            continue
        for i, (origin, _) in enumerate(growth.origins):
            if str(origin) == block:
                yield f"{stack}.{i}.{rest}", name


def record_of(config: Any) -> Adopted | None:
    """The record in the configuration of an adopted model, otherwise None."""
    found, old = getattr(config, "adopted", None), getattr(config, "quantization_config", None)
    if found is None and isinstance(old, dict) and old.get("quant_method") == OLD_METHOD:
        return Adopted.from_dict(old)
    return found


def check_ballast_grows(ballast: str, method: str | None) -> None:
    """Refuse a growth method that is not for models adopted with this form of ballast."""
    if method == "rotate" and ballast == "single":
        raise BadRequestError(
            "grow: a model adopted with ballast='single' has a token whose large bias rotate would spread over the new "
            "ones; use method='zero' or 'split'"
        )


def growth_records(model: nn.Module) -> list[tuple[Any, TokenFormerBaseConfig | Adopted]]:
    """The models within a module that keep account of their growth, each with its record.

    A TokenFormer's record is its configuration, and an adopted model's is `Adopted`. Both have `growth_history`,
    `growth_method`, `check_growth` and `record_growth`, which is all that growth asks of them. `blocks_of` has what
    growth in depth asks.
    """
    found: dict[int, tuple[Any, TokenFormerBaseConfig | Adopted]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, TokenFormerBaseConfig):
            found.setdefault(id(config), (module, config))
        elif isinstance(module, PreTrainedModel) and (record := record_of(config)) is not None:
            found.setdefault(id(config), (module, record))
    return list(found.values())


def blocks_of(model: Any, record: TokenFormerBaseConfig | Adopted) -> Blocks:
    """Where the blocks of a model with this record are; a one-line error if none can be added exactly."""
    return record.blocks if isinstance(record, TokenFormerBaseConfig) else host_blocks(model.config)


def forget_plans(model: PreTrainedModel) -> None:
    """Drop the plans for tensor parallelism, which name weights that are gone."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module._tp_plan, module._ep_plan = {}, {}
