"""What the tests of looking inside share: ids, models with token groups, and what layers put out."""

import torch

import tokenformer
from tokenformer.pattention.groups import layers_with_groups

IDS = torch.arange(24).reshape(2, 12)
CLOSE = 1e-5  # of the largest entry: fp32 sums in another order


def outputs_of(model, run):
    """What every layer puts out, by plain hooks of torch."""
    outputs, hooks = {}, []
    for name, module in model.named_modules():
        keep = lambda module, args, output, name=name: outputs.__setitem__(name, output)  # noqa: E731
        hooks.append(module.register_forward_hook(keep))
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return outputs


def with_groups(model, norm):
    """Two groups that do something, one of them off."""
    for name in ("law", "off"):
        tokenformer.add_tokens(model, name, 3, where="ffn", norm=norm)
        for _, groups in layers_with_groups(model):
            for parameter in groups[name].parameters():
                torch.nn.init.normal_(parameter)
    return tokenformer.use_tokens(model, "law").eval()
