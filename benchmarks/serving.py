"""The server's continuous batching, against one request at a time.

    python benchmarks/serving.py [--quick] [--repeats N] [--out FOLDER]

A server in this process, asked over loopback: 16 requests one after the other, by 16 clients at once, and by 16 clients
who name four token groups in turn; and the same 16 prompts by `generate`, one after the other, without a server.
Leaves: how many times as fast each is as another; benchmarks/results/serving.json.
"""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import torch
from models import shape_of, token_former
from suite import Figure, Options, figure, run
from timing import in_turns
from torch import nn

from tokenformer import TokenFormerForCausalLM, add_tokens, use_tokens
from tokenformer.models.text import byte_tokenizer
from tokenformer.serving import Limits, Served, Server

REQUESTS, GROUPS, GROUP_TOKENS = 16, 4, 16
SHAPE, PROMPT, NEW = (512, 8, 512), 32, 16
QUICK_SHAPE, QUICK_NEW = (64, 1, 16), 2


def with_groups(model: TokenFormerForCausalLM) -> tuple[str, ...]:
    """Give a model groups, as if each had learnt something, all off."""
    names = tuple(f"group{i}" for i in range(GROUPS))
    for i, name in enumerate(names):
        add_tokens(model, name, GROUP_TOKENS, seed=i)
    for name, parameter in model.named_parameters():
        if ".token_groups." in name and name.endswith("value_tokens"):
            nn.init.normal_(parameter, std=0.02)
    use_tokens(model)
    return names


def ask(client: httpx.Client, new: int, job: tuple[list[int], str]) -> None:
    """One request, answered whole."""
    prompt, model = job
    asked = {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 0}
    answer = client.post("/v1/completions", json=asked).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == new


def generate(model: TokenFormerForCausalLM, prompts: list[list[int]], new: int) -> None:
    """All prompts, one after the other, without a server."""
    for prompt in prompts:
        model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, pad_token_id=0)


def measure(options: Options) -> list[Figure]:
    """One model behind a server, and a copy of it."""
    shape, new = (QUICK_SHAPE, QUICK_NEW) if options.quick else (SHAPE, NEW)
    torch.manual_seed(options.seed)
    model = TokenFormerForCausalLM(token_former(*shape, context=256)).eval()
    alone = copy.deepcopy(model)
    groups = with_groups(model)
    prompts = torch.randint(0, 256, (REQUESTS, PROMPT)).tolist()
    plain = [(prompt, "base") for prompt in prompts]
    mixed = [(prompt, f"base:{groups[i % GROUPS]}") for i, prompt in enumerate(prompts)]
    server = Server(Served(model, byte_tokenizer(256), "base", groups), port=0, limits=Limits(running=REQUESTS))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with httpx.Client(base_url=server.address, timeout=600) as client, ThreadPoolExecutor(REQUESTS) as pool:
            send = partial(ask, client, new)
            work: dict[str, Callable[[], object]] = {
                "one at a time": lambda: [send(job) for job in plain],
                "together": lambda: list(pool.map(send, plain)),
                "together, groups": lambda: list(pool.map(send, mixed)),
                "generate": partial(generate, alone, prompts, new),
            }
            times = in_turns(work, options.repeats, warmup=1)
    finally:
        server.drain()
        thread.join()
    details = {
        "shape": shape_of(alone, REQUESTS, PROMPT + new),
        "median_seconds": times.medians,
        "tokens_per_second": {name: REQUESTS * new / seconds for name, seconds in times.medians.items()},
    }
    at = f"server, {REQUESTS} requests of {PROMPT} + {new} tokens"
    return [
        figure(
            f"{at}: times as fast as one at a time", times.speedup("together", "one at a time"), at_least=3, **details
        ),
        figure(f"{at}: times as fast as generate, one at a time", times.speedup("together", "generate")),
        figure(f"{at}, {GROUPS} groups: speed in terms of the base", times.speedup("together, groups", "together")),
        figure(f"{at}, one at a time: speed in terms of generate", times.speedup("one at a time", "generate")),
    ]


if __name__ == "__main__":
    run(measure, __doc__)
