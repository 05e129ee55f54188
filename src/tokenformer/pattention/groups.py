"""Named groups of tokens beside a layer: learnt apart from it, switched, and of each row of a batch its own.

Enters: a layer that maps [..., d_in] to [..., d_out], a Pattention or any other module. Leaves: the same layer, whose
output has that of its groups added:

    own       out = base(x) + Σ V_gᵀ Θ(K_g x), each group with a normaliser of its own: what the base computes never
              changes, groups add up in any order, and with values of zero any keys are exact
    shared    one normaliser over the base's tokens and the group's, as if the base had grown: for Pattentions only

The base keeps its own products, and all groups of a layer have one more pair between them, however many they are. A
layer whose groups are all off does what it did without them, bit for bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..errors import BadRequestError
from .functional import default_tau, token_weights
from .module import Pattention, Tokens, WideBuffers
from .operator import pattention

Norm = Literal["own", "shared"]
NORMS: tuple[str, ...] = get_args(Norm)
BASE = "__base__"  # the name of no group, for a row that has none


class TokenGroup(WideBuffers):
    """The tokens of one group in one layer. Values are zero at birth, or with a shared normaliser the keys.

    With a normaliser of its own a group may have a key bias, which makes a threshold of a single token: see edit().
    """

    tau: Tensor
    key_bias: nn.Parameter | None

    def __init__(
        self,
        d_in: int,
        d_out: int,
        num_tokens: int,
        kind: str,
        norm: Norm,
        *,
        key_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.norm = kind, norm
        self.key_tokens = nn.Parameter(torch.empty(num_tokens, d_in, device=device, dtype=dtype))
        self.value_tokens = nn.Parameter(torch.empty(num_tokens, d_out, device=device, dtype=dtype))
        self.key_bias = nn.Parameter(torch.zeros(num_tokens, device=device, dtype=dtype)) if key_bias else None
        tau_dtype = torch.promote_types(self.key_tokens.dtype, torch.float32)
        self.tau = nn.Buffer(torch.tensor(default_tau(num_tokens, kind), device=device, dtype=tau_dtype))
        self.reset_parameters()

    @property
    def num_tokens(self) -> int:
        return self.key_tokens.shape[0]

    def reset_parameters(self) -> None:
        """Draw new keys, or with a shared normaliser new values."""
        drawn, zero = self.key_tokens, self.value_tokens
        if self.norm == "shared":
            drawn, zero = zero, drawn
        nn.init.normal_(drawn, std=drawn.shape[1] ** -0.5)
        nn.init.zeros_(zero)

    def extra_repr(self) -> str:
        return f"num_tokens={self.num_tokens}, norm={self.norm!r}"


class Switch:
    """Which groups of a model compute: those that are on, or for each row of a batch its own. One for all layers.

    merged: groups that have become part of the model, which compute for every row. was_on: those that were on before
    all were switched off for a while. held: the parameters that were not trained before groups were; None if groups
    have frozen nothing.
    """

    def __init__(self) -> None:
        self.on: tuple[str, ...] = ()
        self.merged: tuple[str, ...] = ()
        self.was_on: tuple[str, ...] = ()
        self.held: list[nn.Parameter] | None = None
        self.rows: tuple[tuple[str, ...], ...] | None = None
        self.lengths: tuple[int, ...] | None = None  # of the rows, if they are laid end to end in one
        self._masks: dict[Any, Tensor] = {}

    def turn_on(self, *names: str) -> None:
        """Switch groups on, besides those that are."""
        self.on = tuple(dict.fromkeys((*self.on, *names)))

    def forget(self, name: str) -> None:
        """A group has gone."""
        self.on, self.merged, self.was_on = (
            tuple(one for one in names if one != name) for names in (self.on, self.merged, self.was_on)
        )
        self.set_rows(None)

    def set_rows(self, rows: Sequence[Sequence[str]] | None, lengths: Sequence[int] | None = None) -> None:
        """From now on, which groups each row of a batch has; None: all rows have those that are on.

        With `lengths` the batch is a single row, in which the rows stand end to end.
        """
        self.rows = None if rows is None else tuple(map(tuple, rows))
        self.lengths = None if lengths is None else tuple(lengths)
        self._masks = {}

    @property
    def used(self) -> tuple[str, ...]:
        """The groups that compute for some row."""
        if self.rows is None:
            return (*self.merged, *self.on)
        return (*self.merged, *dict.fromkeys(name for row in self.rows for name in row))

    def mask(self, names: Sequence[str], sizes: Sequence[int], x: Tensor) -> Tensor | None:
        """For x [rows of the batch, …, d_in], whether a row has each token of these groups; None: all rows have all.

        [rows of the batch, 1, …, tokens], or with rows laid end to end [positions, tokens]. A batch may have several
        rows for each name, one after the other: the beams of a search, or the positions of sequences of one length that
        were laid end to end.
        """
        if self.rows is None:
            return None
        count = len(self.rows)
        if self.lengths is None and x.shape[0] % count:
            raise wrong_count(x.shape[0], count)
        if self.lengths is not None and sum(self.lengths) != x.shape[-2]:
            raise wrong_positions(x.shape[-2], sum(self.lengths))
        if all(set(names) <= {*self.merged, *row} for row in self.rows):
            return None
        key = (*names, *sizes, x.device)
        if key not in self._masks:
            rows = [{*self.merged, *row} for row in self.rows]
            has = torch.tensor([[name in row for name in names] for row in rows], device=x.device)
            mask = has.repeat_interleave(torch.tensor(sizes, device=x.device), dim=1)
            if self.lengths is not None:
                mask = mask.repeat_interleave(torch.tensor(self.lengths, device=x.device), dim=0)
            self._masks[key] = mask
        if self.lengths is not None:
            return self._masks[key]
        mask = self._masks[key].repeat_interleave(x.shape[0] // count, dim=0)
        return mask.view(x.shape[0], *(1,) * (x.dim() - 2), -1)


def wrong_count(rows: int, names: int) -> BadRequestError:
    """The error of a batch with another number of rows than names."""
    return BadRequestError(
        f"the batch has {rows} rows, and names of token groups were given for {names}; give one for every row ({BASE} "
        "for none)"
    )


def wrong_positions(positions: int, named: int) -> BadRequestError:
    """The error of rows laid end to end that are not as long as the batch."""
    return BadRequestError(
        f"the batch has {positions} positions in a row, and the rows that were named have {named} together; give the "
        "length of every row"
    )


class TokenGroups(nn.Module):
    """All groups beside one layer, by name."""

    def __init__(self, d_in: int, d_out: int, kind: str, switch: Switch) -> None:
        super().__init__()
        self.d_in, self.d_out, self.kind, self.switch = d_in, d_out, kind, switch

    def __getitem__(self, name: str) -> TokenGroup:
        group = self._modules[name]
        assert isinstance(group, TokenGroup)
        return group

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    def names(self) -> list[str]:
        """All groups, the oldest first."""
        return list(self._modules)

    def chosen(self, norm: Norm) -> list[str]:
        """Those beside this layer that compute for some row, with that norm."""
        return [name for name in self.switch.used if name in self._modules and self[name].norm == norm]

    def forward(self, x: Tensor) -> Tensor | None:
        """What the groups with a normaliser of their own add for rows x; None if all of them are off."""
        own = self._own_tokens(x)
        if own is None:
            return None
        tokens, tau, segments = own
        x = x.to(tokens.keys.dtype)
        more: dict[str, Any] = {"key_bias": tokens.key_bias, "segments": segments, "mask": tokens.mask}
        return pattention(x, tokens.keys, tokens.values, tau, self.kind, **more)

    def token_weights(self, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Of every group with a normaliser of its own: the weights of its tokens in every row, and their values."""
        own = self._own_tokens(x)
        if own is None:
            return {}
        names = self.chosen("own")
        tokens, tau, segments = own
        x, sizes = x.to(tokens.keys.dtype), [self[name].num_tokens for name in names]
        more: dict[str, Any] = {"key_bias": tokens.key_bias, "segments": segments, "mask": tokens.mask}
        weights = token_weights(x, tokens.keys, tau, self.kind, **more).split(sizes, dim=-1)
        return dict(zip(names, zip(weights, tokens.values.split(sizes), strict=True), strict=True))

    def _own_tokens(self, x: Tensor) -> "tuple[Tokens, Tensor, Sequence[int]] | None":
        """What the groups with a normaliser of their own attend over for rows x; their taus and segments."""
        names = self.chosen("own")
        if not names:
            return None
        groups = [self[name] for name in names]
        sizes = [group.num_tokens for group in groups]
        keys, values = (
            joined([getattr(group, tokens) for group in groups]) for tokens in ("key_tokens", "value_tokens")
        )
        alone = len(groups) == 1
        tau = groups[0].tau if alone else torch.stack([group.tau for group in groups])
        mask = self.switch.mask(names, sizes, x)
        return Tokens(keys, values, _joined_bias(groups), 0, mask), tau, () if alone else sizes

    def extended(self, x: Tensor, base: Tokens) -> Tokens:
        """The base's tokens for rows x, with those of the groups that are on and share its normaliser."""
        names = self.chosen("shared")
        if not names:
            return base
        groups, n, dtype = [self[name] for name in names], base.keys.shape[0], base.keys.dtype
        keys = joined([base.keys, *(group.key_tokens.to(dtype) for group in groups)])
        values = joined([base.values, *(group.value_tokens.to(dtype) for group in groups)])
        key_bias = base.key_bias
        if key_bias is not None:
            key_bias = torch.cat([key_bias, key_bias.new_zeros(keys.shape[0] - n)])
        held = not (base.keys.requires_grad or base.values.requires_grad)
        mask = self.switch.mask(names, [group.num_tokens for group in groups], x)
        if mask is not None:
            mask = torch.cat([mask.new_ones(*mask.shape[:-1], n), mask], dim=-1)
        return Tokens(keys, values, key_bias, n if held else base.frozen, mask)


def joined(tokens: Sequence[Tensor]) -> Tensor:
    """One array of the tokens of several."""
    return tokens[0] if len(tokens) == 1 else torch.cat(list(tokens))


def _joined_bias(groups: "Sequence[TokenGroup]") -> Tensor | None:
    """The biases of the keys of several groups, zero for those that have none; None if none has."""
    if all(group.key_bias is None for group in groups):
        return None
    return torch.cat(
        [group.key_tokens.new_zeros(group.num_tokens) if group.key_bias is None else group.key_bias for group in groups]
    )


def can_be_called(name: str) -> bool:
    """Whether a group may have this name: modules and their attributes share one space."""
    return not hasattr(TokenGroups(1, 1, "l2_gelu", Switch()), name)


def groups_of(layer: nn.Module) -> TokenGroups | None:
    """The groups beside a layer."""
    groups = layer._modules.get("token_groups")
    return groups if isinstance(groups, TokenGroups) else None


def layers_with_groups(model: nn.Module) -> Iterator[tuple[str, TokenGroups]]:
    """Every layer of a model that has groups beside it, by its name."""
    for name, module in model.named_modules():
        groups = groups_of(module)
        if groups is not None:
            yield name, groups


def switch_of(model: nn.Module) -> Switch | None:
    """What decides which groups of a model compute; None if it has none."""
    return next((groups.switch for _, groups in layers_with_groups(model)), None)


def add_group(layer: nn.Module, name: str, group: TokenGroup, switch: Switch) -> None:
    """Put a group beside a layer. It computes as soon as the switch says so."""
    groups = groups_of(layer)
    if groups is None:
        groups = TokenGroups(group.key_tokens.shape[1], group.value_tokens.shape[1], group.kind, switch)
        put_beside(layer, groups)
        groups.train(layer.training)
    groups.add_module(name, group)


def put_beside(layer: nn.Module, groups: TokenGroups) -> None:
    """Let a layer add what its groups compute. A Pattention does so itself, any other module by a hook."""
    layer.token_groups = groups
    if not isinstance(layer, Pattention):
        layer.register_forward_hook(_add_groups, with_kwargs=True)


def take_away(layer: nn.Module) -> None:
    """The layer as it was without groups."""
    del layer.token_groups
    for key, hook in list(layer._forward_hooks.items()):
        if hook is _add_groups:
            del layer._forward_hooks[key]
            layer._forward_hooks_with_kwargs.pop(key, None)


def _add_groups(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
    groups = groups_of(layer)
    assert groups is not None
    x = args[0] if args else next(iter(kwargs.values()))
    added = groups(x)
    if added is None:
        return output
    if isinstance(output, tuple):
        return (output[0] + added.to(output[0].dtype), *output[1:])
    return output + added.to(output.dtype)
