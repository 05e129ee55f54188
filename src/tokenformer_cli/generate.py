"""generate: text from a model, shown as it is generated."""

import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .terminal import BadCommandError, TokenFraction, TokenGroups, TrustRemoteCode, put_beside, quiet_libraries

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
    draft: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="A smaller model that guesses ahead, such as this one before it grew: see the docs."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …", show_default="the fastest")] = None,
    tokens: TokenGroups = None,
    token_fraction: TokenFraction = None,
    token_top_k: Annotated[
        int | None,
        typer.Option(min=1, help="The tokens of a feed-forward block that mix their values.", show_default="all"),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Continue a prompt. Text is written to stdout as it is generated.

    A prompt from stdin loses one final newline, which the shell adds. A folder without a tokenizer is read as raw bytes
    if its vocabulary is 256 or 257.
    """
    for option, share in (("--temperature", temperature), ("--top-p", top_p)):
        if math.isnan(share):  # which is neither below nor above any bound
            raise BadCommandError(f"{option} {share} was given; a number is expected")
    if draft is not None and not cache:
        raise BadCommandError("--draft and --no-cache exclude each other: what was guessed is checked with the cache")
    given = _prompt(prompt)

    import torch

    from tokenformer import for_inference
    from tokenformer.errors import BadRequestError
    from tokenformer.models import TokenFormerBaseConfig
    from tokenformer.models.loading import check_finite, read_generator
    from tokenformer.models.text import TextStream, encode, read_tokenizer

    quiet_libraries()
    model = read_generator(folder, device, trust_remote_code=trust_remote_code, token_fraction=token_fraction)
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
    helper = None if draft is None else _draft(draft, folder, model, tokenizer, trust_remote_code)
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k} if temperature > 0 else {}
    if token_top_k is not None:
        if not isinstance(model.config, TokenFormerBaseConfig):
            raise BadRequestError(f"--token-top-k is for a TokenFormer, and {folder} holds a {model.config.model_type}")
        sampling["token_top_k"] = token_top_k
    if seed is not None:
        torch.manual_seed(seed)
    input_ids = torch.tensor([ids], device=model.device)
    for_inference(model).generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        streamer=TextStream(tokenizer, lambda text: typer.echo(text, nl=False)),
        max_new_tokens=max_new_tokens or min(NEW_TOKENS, room),
        do_sample=temperature > 0,
        use_cache=cache,
        assistant_model=helper,
        pad_token_id=0,  # never used for one sequence; without it transformers warns
        **sampling,
    )
    typer.echo()


def _draft(folder: Path, of: Path, model: Any, tokenizer: Any, trust_remote_code: bool) -> Any:
    """The model that guesses ahead. It must read and write the same ids, and as many of them."""
    from tokenformer import for_inference
    from tokenformer.errors import BadRequestError
    from tokenformer.models.loading import check_finite, read_config, read_generator
    from tokenformer.models.text import read_tokenizer

    config, ours = read_config(folder, trust_remote_code=trust_remote_code), model.config
    for what, theirs, needed in (
        ("a vocabulary", getattr(config, "vocab_size", 0), ours.vocab_size),
        ("a context", getattr(config, "max_position_embeddings", 0), ours.max_position_embeddings),
    ):
        if theirs < needed or (what == "a vocabulary" and theirs != needed):
            raise BadRequestError(
                f"--draft {folder} has {what} of {theirs:,}, and {of} one of {needed:,}; give a model that {of} was "
                "grown from, or another of the same tokenizer"
            )
    if read_tokenizer(folder, config, trust_remote_code=trust_remote_code).get_vocab() != tokenizer.get_vocab():
        raise BadRequestError(f"--draft {folder} has another tokenizer than {of}; their ids mean different text")
    draft = read_generator(folder, str(model.device), any_family=True, trust_remote_code=trust_remote_code)
    check_finite(draft, folder)
    return for_inference(draft)


def _prompt(argument: str | None) -> bytes:
    """The prompt as the bytes that were typed or piped in."""
    if argument not in (None, "-"):
        return os.fsencode(argument)
    if sys.stdin.isatty():
        raise BadCommandError("no prompt was given; write it after the model's folder, or pipe it in")
    return sys.stdin.buffer.read().removesuffix(b"\n")
