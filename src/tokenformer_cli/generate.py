"""generate: text from a model, shown as it is generated."""

import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .terminal import BadCommandError, TokenGroups, TrustRemoteCode, put_beside, quiet_libraries

commands = typer.Typer()

NEW_TOKENS = 100


@commands.command("generate", epilog="Example: tokenformer generate models/mine 'Once upon a time' --temperature 0.7")
def generate_command(
    folder: Annotated[Path, typer.Argument(metavar="MODEL", help="The model folder.")],
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The text to continue; - or nothing reads stdin.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="The most tokens to generate.", show_default=f"{NEW_TOKENS}, if the context has room"),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, max=1000, help="0 always takes the likeliest token.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample from this share of the probability.")] = 0.95,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many tokens; 0 from all.")] = 0,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**64 - 1, help="Makes sampling repeatable.", show_default="none")
    ] = None,
    cache: Annotated[
        bool, typer.Option(" /--no-cache", show_default=False, help="Recompute every step: slow, for checks.")
    ] = True,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …", show_default="the fastest")] = None,
    tokens: TokenGroups = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Continue a prompt. Text is written to stdout as it is generated.

    A prompt from stdin loses one final newline, which the shell adds. A folder without a tokenizer is read as raw bytes
    if its vocabulary is 256 or 257.
    """
    for option, share in (("--temperature", temperature), ("--top-p", top_p)):
        if math.isnan(share):  # which is neither below nor above any bound
            raise BadCommandError(f"{option} {share} was given; a number is expected")
    given = _prompt(prompt)

    import torch

    from tokenformer.errors import BadRequestError
    from tokenformer.models.loading import check_finite, read_generator
    from tokenformer.models.text import TextStream, encode, read_tokenizer

    quiet_libraries()
    model = read_generator(folder, device, trust_remote_code=trust_remote_code)
    put_beside(model, tokens)
    check_finite(model, folder)
    tokenizer = read_tokenizer(folder, model.config, trust_remote_code=trust_remote_code)
    settings = model.generation_config
    if tokenizer.eos_token_id is not None and not isinstance(settings.eos_token_id, list):
        settings.eos_token_id = tokenizer.eos_token_id
    ids = encode(tokenizer, given, model.config.vocab_size)
    if not ids:
        raise BadRequestError("the prompt is empty; pass at least one character")
    context = model.config.max_position_embeddings
    room = context - len(ids)
    if room < (max_new_tokens or 1):
        asked = "one" if max_new_tokens is None else f"{max_new_tokens:,}"
        way_out = f"--max-new-tokens of at most {room:,}, or a shorter prompt" if room > 0 else "a shorter prompt"
        raise BadRequestError(
            f"the prompt has {len(ids):,} tokens, and {asked} more would pass the model's context of {context:,}; use "
            f"{way_out}"
        )
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k} if temperature > 0 else {}
    if seed is not None:
        torch.manual_seed(seed)
    input_ids = torch.tensor([ids], device=model.device)
    model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        streamer=TextStream(tokenizer, lambda text: typer.echo(text, nl=False)),
        max_new_tokens=max_new_tokens or min(NEW_TOKENS, room),
        do_sample=temperature > 0,
        use_cache=cache,
        pad_token_id=0,  # never used for one sequence; without it transformers warns
        **sampling,
    )
    typer.echo()


def _prompt(argument: str | None) -> bytes:
    """The prompt as the bytes that were typed or piped in."""
    if argument not in (None, "-"):
        return os.fsencode(argument)
    if sys.stdin.isatty():
        raise BadCommandError("no prompt was given; write it after the model's folder, or pipe it in")
    return sys.stdin.buffer.read().removesuffix(b"\n")
