"""The README beside an exported file: what it takes and returns, and a script of a few lines that runs it.

Enters: a graph, the format, and whether a tokenizer.json lies beside the file. The tests run the script.
"""

from torch.utils import _pytree as pytree

from .graph import Graph

RUNTIMES = {"onnx": "ONNX Runtime", "aoti": "torch (AOTInductor)"}

TEXT = """\
# {model}, exported

`{file}` holds a {model} for {runtime}; tokenformer is not needed to run it. {said}

{interface}

In this folder:

```python
{script}```
"""

CACHED = """\
A call takes `input_ids`, `attention_mask`, `position_ids` and `past_key_values`, and returns `logits` and `present`.
The first call reads a prompt, with `past_key_values` of length 0; each further one takes what the last returned as
`present`. The mask covers the cache and the new tokens; it is 0 for padding, which stands on the left. The position of
a token is the number of those before it that are not padding. Batch and lengths may change from call to call."""
ONCE = "A call takes {takes} and returns {returns}. {free} may change from call to call."
CONTIGUOUS = " Tensors must be contiguous: of others it computes something else, and does not say so."

TOKENIZER = """\
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("tokenizer.json")
"""

SCRIPTS = {
    ("onnx", "cached"): """\
import numpy as np
import onnxruntime
{tokenizer}
session = onnxruntime.InferenceSession("model.onnx")
cache = [each for each in session.get_inputs() if each.name.startswith("past_key_values")]
past = {{each.name: np.zeros((1, each.shape[1], 0, each.shape[3]), np.{dtype}) for each in cache}}
new, written = np.array([{ids}]), []
for seen in range(new.shape[1], new.shape[1] + 20):
    inputs = {{
        "input_ids": new,
        "attention_mask": np.ones((1, seen), np.int64),
        "position_ids": np.arange(seen - new.shape[1], seen)[None],
    }}
    logits, *present = session.run(None, inputs | past)
    past, new = dict(zip(past, present)), logits[:, -1:].argmax(-1)
    written.append(int(new[0, 0]))
print({shown})
""",
    ("aoti", "cached"): """\
import torch
{tokenizer}
run = torch._inductor.aoti_load_package("model.pt2")
sizes = {cache}  # heads of every layer's cache, and their width
empty = [torch.zeros(1, heads, 0, width, dtype=torch.{dtype}{device}) for heads, width in sizes]
past = {{str(i): {{"key": each, "value": each}} for i, each in enumerate(empty)}}
new, written = torch.tensor([{ids}]{device}), []
for seen in range(new.shape[1], new.shape[1] + 20):
    out = run(
        input_ids=new,
        attention_mask=torch.ones(1, seen, dtype=torch.int64{device}),
        position_ids=torch.arange(seen - new.shape[1], seen{device})[None],
        past_key_values=past,
    )
    past, new = out["present"], out["logits"][:, -1:].argmax(-1)
    written.append(int(new[0, 0]))
print({shown})
""",
    ("onnx", "text"): """\
import numpy as np
import onnxruntime
{tokenizer}
session = onnxruntime.InferenceSession("model.onnx")
ids = np.array([{ids}])
output, *_ = session.run(None, {{"input_ids": ids, "attention_mask": np.ones_like(ids)}})
print(output.shape)
""",
    ("aoti", "text"): """\
import torch
{tokenizer}
run = torch._inductor.aoti_load_package("model.pt2")
ids = torch.tensor([{ids}]{device})
output, *_ = run(input_ids=ids, attention_mask=torch.ones_like(ids)).values()
print(output.shape)
""",
    ("onnx", "images"): """\
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
images = np.zeros({shape}, np.{dtype})  # prepared as preprocessor_config.json says
output, *_ = session.run(None, {{"pixel_values": images}})
print(output.argmax(-1))
""",
    ("aoti", "images"): """\
import torch

run = torch._inductor.aoti_load_package("model.pt2")
images = torch.zeros({shape}, dtype=torch.{dtype}{device})  # prepared as preprocessor_config.json says
output, *_ = run(pixel_values=images).values()
print(output.argmax(-1))
""",
}


def write_readme(graph: Graph, to: str, file: str, said: str, tokenizer: bool) -> str:
    """The text. `said`: how far the file is from the model."""
    runtime = RUNTIMES[to]
    interface = _interface(graph) + (CONTIGUOUS if to == "aoti" else "")
    fields = {"model": type(graph.model).__name__, "file": file, "runtime": runtime, "said": said}
    return TEXT.format(**fields, interface=interface, script=_script(graph, to, tokenizer))


def _interface(graph: Graph) -> str:
    if graph.cache is not None:
        return CACHED
    takes = " and ".join(f"`{name}`" for name in graph.inputs)
    free = "Batch and length" if graph.takes_text else "The batch"
    return ONCE.format(takes=takes, returns="a tensor for every output of the model", free=free)


def _script(graph: Graph, to: str, tokenizer: bool) -> str:
    kind = "images" if not graph.takes_text else "text" if graph.cache is None else "cached"
    device, dtype = graph.model.device, next(graph.model.parameters()).dtype
    floats = [tensor.shape for tensor in pytree.tree_leaves(graph.inputs) if tensor.is_floating_point()]
    return SCRIPTS[to, kind].format(
        tokenizer=TOKENIZER if tokenizer else "",
        ids='tokenizer.encode("The").ids' if tokenizer else "[1, 2, 3]",
        shown="tokenizer.decode(written)" if tokenizer else "written",
        device="" if device.type == "cpu" else f', device="{device.type}"',
        dtype=str(dtype).removeprefix("torch."),
        cache=list(graph.cache or ()),
        shape=tuple(floats[0]) if floats else (),
    )
