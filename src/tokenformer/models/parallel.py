"""Tensor parallelism for Pattention: every rank holds a slice of a layer's parameter tokens.

TokenFormerConfig's plan names the layers. To apply it, under torchrun:
`from_pretrained(..., distributed_config=DistributedConfig(tp_size=2))`. Only the normaliser and the output
of a Pattention look across tokens, and DTensor adds both up over the ranks.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers.distributed.tensor_parallel import TensorParallelLayer


class TokenParallel(TensorParallelLayer):
    """Key and value tokens are split over the ranks; rows enter and leave whole."""

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        tokens = module.get_parameter(param)
        # Without a source rank nothing is sent: every rank loads its own slice of the checkpoint later.
        slices = distribute_tensor(tokens, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(param, nn.Parameter(slices, requires_grad=tokens.requires_grad))

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return (DTensor.from_local(args[0], mesh, [Replicate()], run_check=False), *args[1:]), kwargs

    def transform_output_post_forward(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.redistribute(placements=[Replicate()]).to_local()
