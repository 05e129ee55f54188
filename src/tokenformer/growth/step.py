"""What a growth step is: every layer with its token counts before and after, and which blocks are new.

Steps of shrinking/ are said in the same words: their layers keep tokens instead of appending them.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ..models.blocks import BlockGrowth

Method = Literal["zero", "split", "rotate", "random"]
METHODS: tuple[str, ...] = get_args(Method)
# The steps that leave old tokens as they are.
APPENDING = ("zero", "rotate", "random", "group")
# The steps of shrinking/, which append nothing: they drop tokens, or put them in another order.
REARRANGING = ("shrink", "sort")


@dataclass(frozen=True)
class LayerGrowth:
    """One layer: every old token is repeated `copies` times, then new tokens fill up to `after`.

    `rotated`: the keys of the new tokens are rotations of the old ones, instead of zero. `kept`: in a step of
    shrinking/, which appends nothing, the old token that each token of the layer was; tau is then `tau_factor` of it.
    `quantised`: how many of the old tokens are integers, and in no parameter.
    """

    before: int
    after: int
    copies: int
    rotated: bool = False
    kept: tuple[int, ...] | None = None
    tau_factor: float = 1.0
    quantised: int = 0

    @classmethod
    def by(cls, method: str, before: int, after: int, key_size: int, quantised: int = 0) -> "LayerGrowth":
        """How `method` gets from `before` tokens to `after`. Too few new keys cannot be rotations."""
        rotated = method == "rotate" and after - before >= min(before, key_size)
        copies = after // before if method == "split" else 1
        return cls(before, after, copies=copies, rotated=rotated, quantised=quantised)

    @property
    def appended(self) -> int:
        return self.after - self.copies * self.before


@dataclass(frozen=True, kw_only=True)
class DepthGrowth(BlockGrowth):
    """More blocks in a model, where their list is called `stack`."""

    stack: str


@dataclass(frozen=True)
class GroupGrowth:
    """A token group, and how many tokens it has beside each layer."""

    name: str
    layers: dict[str, int]

    def has(self, parameter: str) -> bool:
        """Whether a parameter or its module, by name, is of this group."""
        return self._sign in f"{parameter}."

    def beside(self, parameter: str) -> str:
        """The parameter of the layer beside which one of this group stands."""
        return parameter.replace(self._sign, ".")

    @property
    def _sign(self) -> str:
        return f".token_groups.{self.name}."


@dataclass(frozen=True)
class Growth:
    """One growth step of a model. `noise` is the size of split's random parts, in units of the values' scale.

    layers: how the tokens of each layer grow, by its name before the step. depth: how the number of blocks does. group:
    what is appended as a token group, and then all else stays.
    """

    method: str
    seed: int
    noise: float
    layers: dict[str, LayerGrowth]
    depth: DepthGrowth | None = None
    group: GroupGrowth | None = None

    @property
    def verb(self) -> str:
        """What the step does, as errors begin."""
        return self.method if self.method in REARRANGING else "grow"

    @property
    def label(self) -> str:
        """The method, as people read it."""
        if self.group is not None:
            return f"group {self.group.name}"
        return " + ".join([self.method] * bool(self.layers) + ["depth"] * (self.depth is not None))

    def origin(self, name: str) -> tuple[str, bool]:
        """What a module or parameter of the grown model was called before, and whether its block is new.

        The name of one in a new block is that of what it is made from; in a new group, that of what it is beside.
        """
        if self.group is not None and self.group.has(name):
            return self.group.beside(name), True
        if self.depth is None or not name.startswith(f"{self.depth.stack}."):
            return name, False
        block, _, rest = name.removeprefix(f"{self.depth.stack}.").partition(".")
        old, new = self.depth.origins[int(block)]
        return f"{self.depth.stack}.{old}.{rest}", new

    def copies(self, name: str) -> bool:
        """Whether copies are made of a module or parameter, by its name before."""
        if self.depth is None or self.depth.new_blocks == "fresh" or not name.startswith(f"{self.depth.stack}."):
            return False
        block = int(name.removeprefix(f"{self.depth.stack}.").partition(".")[0])
        return (block, True) in self.depth.origins

    def to_record(self) -> dict[str, Any]:
        """What a model keeps of the step, beside its token counts."""
        step: dict[str, Any] = {"method": self.method, "seed": self.seed, "noise": self.noise}
        if self.depth is not None:
            step["blocks"] = asdict(self.depth)
            del step["blocks"]["stack"]
        if self.group is not None:
            step["group"] = self.group.name
        if self.method == "shrink":
            step["tau_factors"] = self._tau_factors()
        return step

    def _tau_factors(self) -> dict[str, float]:
        """By the last part of a layer's name, the geometric mean over the layers that have it."""
        logs: dict[str, list[float]] = {}
        for name, layer in self.layers.items():
            logs.setdefault(name.rpartition(".")[2], []).append(math.log(layer.tau_factor))
        return {last: math.exp(sum(found) / len(found)) for last, found in logs.items()}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Growth":
        """The inverse of `to_dict`."""
        layers = {name: LayerGrowth(**layer) for name, layer in data["layers"].items()}
        depth, group = data.get("depth"), data.get("group")
        how = (depth and DepthGrowth(**depth), group and GroupGrowth(**group))
        return cls(data["method"], data["seed"], data["noise"], layers, *how)
