"""One process or many: how a checkpoint becomes the model that a process trains, and whole tensors become shards.

`ddp` copies the model to every process; `fsdp` cuts it up with transformers' own FSDP2, which Trainer on a CPU would
silently replace by DDP if it were asked for it itself. One process has whole tensors only.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import PartialState
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.distributed import DistributedConfig

from ..errors import BadRequestError, BadResultError
from ..models import TokenFormerPreTrainedModel


def load_model(
    kind: type[TokenFormerPreTrainedModel], checkpoint: Path, parallel: str, processes: PartialState
) -> TokenFormerPreTrainedModel:
    """The model of a checkpoint in fp32, whole or sharded over the processes."""
    if parallel == "ddp" or processes.num_processes == 1:
        return kind.from_pretrained(checkpoint, dtype=torch.float32)
    model = kind.from_pretrained(
        checkpoint, dtype=torch.float32, distributed_config=DistributedConfig(fsdp_size=processes.num_processes)
    )
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if whole:
        raise BadRequestError(f"training.parallel=fsdp left {whole[0]} whole; use training.parallel=ddp")
    return model


@contextmanager
def naming_a_lost_process(folder: Path, processes: PartialState) -> Iterator[None]:
    """What to do when another process is gone, in place of what the backend says of its connection."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)  # gloo has no class
        if processes.num_processes == 1 or not lost:
            raise
        raise BadResultError(
            "another process of this run has died; torchrun prints its exit code below (-9: killed, often for lack of "
            f"memory). Run the same command again to resume from the last checkpoint in {folder}"
        ) from error


def reshard(model: nn.Module) -> None:
    """After a forward pass without a backward one: put FSDP's whole parameters away, and show their shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def say_what_is_parallel(console: Console, model: nn.Module, parallel: str, processes: PartialState) -> None:
    """One line about what was really done."""
    if processes.num_processes == 1:
        return
    backend = torch.distributed.get_backend()
    sharded = sum(isinstance(parameter, DTensor) for parameter in model.parameters())
    how = f"FSDP2, {sharded} parameters sharded" if sharded else "DDP"
    console.print(f"{processes.num_processes} processes over {backend}: {how}")


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
    """A whole tensor where the parameter is, sharded as it is."""
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
