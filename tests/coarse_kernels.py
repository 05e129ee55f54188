"""Stand-ins for the element-wise kernels of other makes of CPU, so that a fault of one of them shows on any machine.

oneDNN's AVX-512 GeLU doubles a number before it halves it, so beyond half of a dtype's range it gives infinity where
its AVX2 twin does not. Under `CoarseKernels` GeLU does that on every machine, and no kernel of this kind may be given
a number beyond a quarter of the range.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# Kernels that compute something transcendental, whose inner steps are each library's own business.
TRANSCENDENTAL = {
    *(aten.gelu, aten.gelu_, aten.gelu_backward, aten.silu, aten.silu_, aten.silu_backward),
    *(aten._softmax, aten._softmax_backward_data, aten.logsumexp, aten.exp, aten.exp_, aten.erf, aten.tanh),
}


class CoarseKernels(TorchDispatchMode):
    """Within it torch has the coarsest kernels that any CPU has. Operators of our own are not looked into."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kernel = func.overloadpacket
        if kernel in TRANSCENDENTAL:
            for tensor in (given for given in args if isinstance(given, torch.Tensor)):
                quarter = torch.finfo(tensor.dtype).max / 4
                assert tensor.abs().amax() <= quarter, f"{func} was given {tensor.abs().amax():.3g}"
        if kernel in (aten.gelu, aten.gelu_) and "approximate" not in (kwargs or {}):
            scores = args[0]
            doubled = scores * (1 + torch.special.erf(scores * 0.5**0.5))  # up to twice the score
            return scores.copy_(doubled / 2) if kernel is aten.gelu_ else doubled / 2
        return func(*args, **(kwargs or {}))
