"""Whole tensors and the shards of them that FSDP2 leaves a process with. One process has whole ones only."""

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """The tensors of all processes, on the CPU. Every process must call it; those that do not `keep` get nothing."""
    found = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            found[name] = whole.detach().cpu().contiguous()
    return found


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor where the parameter is, cut up as it is."""
    tensor = tensor.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    return tensor


def local_rows(parameter: Tensor, first: int) -> int:
    """How many of the `first` rows of a parameter this process holds."""
    if not isinstance(parameter, DTensor):
        return first
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return max(0, min(first - offset[0], shape[0]))
