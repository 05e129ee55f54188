"""generate: text from a model, shown as it is made."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import BadRequestError
from .summary import quiet_libraries

commands = typer.Typer()


@commands.command("generate", epilog="Example: tokenformer generate models/mine 'Once upon a time' --temperature 0.7")
def generate_command(
    folder: Annotated[Path, typer.Argument(metavar="MODEL", help="The model folder.")],
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The text to go on from; - or none reads stdin.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to make at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token every time.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample from this share of the probability.")] = 0.95,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many tokens; 0 from all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.", show_default="none")] = None,
    cache: Annotated[
        bool, typer.Option(" /--no-cache", show_default=False, help="Compute every step afresh: slow, for checks.")
    ] = True,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …", show_default="the fastest")] = None,
) -> None:
    """Go on from a prompt. The new text goes to stdout as it is made, and ends at the end of text.

    A prompt from stdin loses one final newline, which the shell adds. A folder without a tokenizer is read as raw bytes
    if its vocabulary is 256 or 257.
    """
    given = _prompt(prompt)

    import torch

    from ..models.loading import read_own_model
    from ..models.text import TextStream, encode, read_tokenizer

    quiet_libraries()
    model: Any = read_own_model(folder, device)
    if not model.can_generate():
        raise BadRequestError(f"{folder} holds a {type(model).__name__}, which does not generate text")
    tokenizer = read_tokenizer(folder, model.config)
    settings = model.generation_config
    if tokenizer.eos_token_id is not None:
        settings.eos_token_id = tokenizer.eos_token_id
    ids = encode(tokenizer, given, model.config.vocab_size)
    if not ids:
        raise BadRequestError("the prompt is empty; give at least one character")
    context = model.config.max_position_embeddings
    if len(ids) + max_new_tokens > context:
        raise BadRequestError(
            f"the prompt has {len(ids)} tokens, and {max_new_tokens} more would pass the model's context of {context}; "
            "give a shorter prompt or a smaller --max-new-tokens"
        )
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k} if temperature > 0 else {}
    if seed is not None:
        torch.manual_seed(seed)
    input_ids = torch.tensor([ids], device=model.device)
    model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        streamer=TextStream(tokenizer, lambda text: typer.echo(text, nl=False)),
        max_new_tokens=max_new_tokens,
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
        raise BadRequestError("no prompt was given; write it after the model's folder, or pipe it in")
    return sys.stdin.buffer.read().removesuffix(b"\n")
