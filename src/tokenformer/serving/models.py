"""What is served: a model with its tokenizer, its sizes and token groups, under the names that requests use.

Enters: a model folder, the shares of its tokens to offer, and the groups to put beside it. Leaves: `Served`, which
knows every name (`base`, `base@0.5`, `base:law`, `base@0.5:law+fr`), and turns prompts and conversations into ids.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from ..errors import BadRequestError, did_you_mean, one_line
from ..groups import token_groups
from ..models import TokenFormerBaseConfig, for_inference
from ..models.loading import check_finite, read_config, read_generator
from ..models.prefixes import check_prefixes, offer_sizes
from ..models.text import encode, read_tokenizer
from ..pattention import pattention_layers
from ..pattention.groups import switch_of
from ..pattention.sizes import WHOLE
from ..quantisation import quantize
from .limits import bad_request

SIZE_MARK, GROUP_MARK, PLUS = "@", ":", "+"


class Choice(NamedTuple):
    """What a name asks for: token groups, and the share of every layer's tokens."""

    groups: tuple[str, ...] = ()
    size: float = WHOLE


@dataclass
class Served:
    """A model that is served.

    name: what requests call it. groups: those that a request may name. always: those that are on under every name,
    because the saved model has them on. sizes: the shares of its tokens, besides all, that a request may name.
    """

    model: PreTrainedModel
    tokenizer: Any
    name: str
    groups: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    sizes: tuple[float, ...] = ()

    @property
    def context(self) -> int:
        return self.model.config.max_position_embeddings

    @property
    def names(self) -> list[str]:
        """The model, each of its sizes, and the model with each of its groups."""
        return [*self._sizes_by_name, *(f"{self.name}{GROUP_MARK}{group}" for group in self.groups)]

    @property
    def _sizes_by_name(self) -> dict[str, float]:
        return {self.name: WHOLE, **{f"{self.name}{SIZE_MARK}{size:g}": size for size in self.sizes}}

    @property
    def stop_ids(self) -> list[int]:
        """The ids that end an answer."""
        ids = self.model.generation_config.eos_token_id
        if self.tokenizer.eos_token_id is not None and not isinstance(ids, list):
            ids = self.tokenizer.eos_token_id
        return [] if ids is None else ids if isinstance(ids, list) else [ids]

    def choice(self, asked: str) -> Choice:
        """What a name asks for; a refusal if it is not one of ours."""
        for name, size in self._sizes_by_name.items():
            if asked == name:
                return Choice((), size)
            groups = tuple(dict.fromkeys(asked.removeprefix(f"{name}{GROUP_MARK}").split(PLUS)))
            if asked.startswith(f"{name}{GROUP_MARK}") and set(groups) <= set(self.groups):
                return Choice(groups, size)
        raise bad_request(
            f"the model {asked!r} is not served here; {did_you_mean(asked, self.names)}",
            "model",
            "model_not_found",
            404,
        )

    def ids_of(self, prompt: str | Sequence[int]) -> list[int]:
        """The ids of a prompt, which may be ids already."""
        rows = self.model.config.get_text_config().vocab_size
        if not isinstance(prompt, str):
            if any(not 0 <= token < rows for token in prompt):
                raise bad_request(f"prompt: token ids are from 0 to {rows - 1:,}", "prompt")
            return list(prompt)
        try:
            return encode(self.tokenizer, prompt, rows)
        except (BadRequestError, UnicodeError) as error:  # JSON can spell half a character
            raise bad_request(f"prompt: {one_line(error)}", "prompt") from error

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The ids of a conversation, by the chat template of the model's folder."""
        if not self.tokenizer.chat_template:
            raise bad_request(
                f"{self.name} has no chat template; put chat_template.jinja into the model's folder, or use "
                "/v1/completions"
            )
        try:
            read = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except Exception as error:  # templates raise what they like
            raise bad_request(f"messages: the chat template refused them: {one_line(error)}", "messages") from error
        return self.ids_of(read["input_ids"])


def load_served(
    folder: str | os.PathLike,
    *,
    name: str | None = None,
    device: str | None = None,
    put_beside: Callable[[PreTrainedModel], None] = lambda _: None,
    int8: bool = False,
    sizes: Sequence[float] = (),
    trust_remote_code: bool = False,
) -> Served:
    """Read what is to be served.

    Args:
        folder: the model's.
        name: what requests call it; the folder's name unless given.
        device: where it computes; None is the fastest there is.
        put_beside: loads token groups onto the model.
        int8: quantise the model's own tokens.
        sizes: the shares of every layer's tokens that are offered besides all, of a model whose tokens are sorted.
        trust_remote_code: run Python code that comes with the model.
    """
    sizes = tuple(dict.fromkeys(size for size in sizes if size != WHOLE))
    if sizes and int8:
        raise BadRequestError(
            "sizes and int8 were given; integers are packed for the whole model. Serve one of them, or the share of "
            "the folder that you need, quantised"
        )
    if sizes:
        config = read_config(folder, TokenFormerBaseConfig, or_adopted=True, trust_remote_code=trust_remote_code)
        for size in sizes:
            check_prefixes(config, size, folder, "size")
    model = read_generator(folder, device, trust_remote_code=trust_remote_code)
    if int8 and any(layer.num_quantised < layer.num_tokens for _, layer in pattention_layers(model)):
        quantize(model, "int8")
    before = switch_of(model)
    always = before.on if before is not None else ()
    known = {facts.name for facts in token_groups(model)}
    put_beside(model)
    check_finite(model, folder)
    if sizes:
        offer_sizes(model, sizes)
    for_inference(model)
    groups = tuple(facts.name for facts in token_groups(model) if facts.name not in known)
    tokenizer = read_tokenizer(folder, model.config, trust_remote_code=trust_remote_code)
    return Served(model, tokenizer, name or Path(folder).resolve().name, groups, always, sizes)
