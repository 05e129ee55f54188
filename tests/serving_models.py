"""What the tests of the server serve: a tiny model whose greedy answers differ clearly between its token groups."""

import copy
import threading
from contextlib import contextmanager
from functools import cache

import torch

from conftest import make_tiny
from tokenformer import TokenFormerForCausalLM, add_tokens, rank_tokens, save_tokens, sort_tokens, use_tokens
from tokenformer.models.prefixes import offer_sizes
from tokenformer.models.text import byte_tokenizer
from tokenformer.serving import Served, Server

GROUPS = ("law", "fr")
SIZES = (0.5, 0.25)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_served(chat=True, sizes=()) -> Served:
    """The tiny model as `base`, with two groups that are off unless they are named, and sizes to choose from."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    model = copy.deepcopy(_model())
    if sizes:
        offer_sizes(model, sizes)
    return Served(model, tokenizer, "base", GROUPS, sizes=sizes)


@cache
def _model() -> TokenFormerForCausalLM:
    """It only writes ASCII, and its logits are far apart: sums that differ in the last bit choose the same token.

    Made once, before any server runs: threads share the random numbers that it is drawn from.
    """
    model = make_tiny(vocab_size=257, eos_token_id=256)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.normal_(std=1.0, generator=generator)
        table[:32] = table[127:] = 0
        for tensor, values in model.named_parameters():
            if tensor.endswith("value_tokens"):  # what the blocks write outweighs the last token
                values.normal_(std=2.0, generator=generator)
        for name in GROUPS:
            add_tokens(model, name, 4, where="ffn")
            for tensor, values in model.named_parameters():
                if f"token_groups.{name}.value_tokens" in tensor:
                    values.normal_(std=12.0, generator=generator)
    use_tokens(model)
    sort_tokens(model, rank_tokens(model, [torch.randint(32, 127, (2, 64), generator=generator)]))
    return model


def save_served(folder) -> None:
    """The same as folders: base, law, fr."""
    served = make_served()
    for name in GROUPS:
        save_tokens(served.model, name, folder / name)
        served.model.delete_adapter(name)
    served.model.save_pretrained(folder / "base")
    served.tokenizer.save_pretrained(folder / "base")


def greedy(served, name, prompt, new_tokens) -> str:
    """The answer by `generate`, one request at a time."""
    ids = torch.tensor([list(prompt.encode())])
    groups = [list(served.choice(name).groups) or "__base__"]
    with torch.no_grad():
        out = served.model.generate(
            ids, adapter_names=groups, max_new_tokens=new_tokens, do_sample=False, pad_token_id=256
        )
    return served.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@contextmanager
def running(served, **settings):
    """A server in a thread of this process, on a free port."""
    server = Server(served, port=0, **settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.drain()
        server.drain()
        thread.join(timeout=60)
        assert not thread.is_alive()
