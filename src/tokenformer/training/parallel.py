"""One process or many: how a checkpoint becomes the model that a process trains, and proof of what was done.

`ddp` copies the model to every process; `fsdp` cuts it up with transformers' own FSDP2, which Trainer on a CPU would
silently replace by DDP if it were asked for it itself.
"""

from pathlib import Path

import torch
from accelerate import PartialState
from rich.console import Console
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from ..errors import BadRequestError
from ..models import TokenFormerPreTrainedModel


def load_model(
    kind: type[TokenFormerPreTrainedModel], checkpoint: Path, parallel: str, processes: PartialState
) -> TokenFormerPreTrainedModel:
    """The model of a checkpoint in fp32, whole or cut up over the processes."""
    if parallel == "ddp" or processes.num_processes == 1:
        return kind.from_pretrained(checkpoint, dtype=torch.float32)
    model = kind.from_pretrained(
        checkpoint, dtype=torch.float32, distributed_config=DistributedConfig(fsdp_size=processes.num_processes)
    )
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if whole:
        raise BadRequestError(f"training.parallel=fsdp left {whole[0]} whole; use training.parallel=ddp")
    return model


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
    how = f"FSDP2, {sharded} parameters cut up" if sharded else "DDP"
    console.print(f"{processes.num_processes} processes over {backend}: {how}")
