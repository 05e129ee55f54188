"""The language models that are compared: ours, and a GPT-NeoX with as many parameters; and a training step of either.

Enters: a shape. Leaves: configurations, models and callables. Both have the same depth, vocabulary, rotary share,
attention kernel (sdpa) and tied embedding; the Transformer's FFN is four times as wide as the model.
"""

import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import GPTNeoXForCausalLM, PreTrainedConfig

from tokenformer import TokenFormerConfig, TokenFormerForCausalLM
from tokenformer.cost import equal_neox

HEAD = 64
NO_END = {"bos_token_id": None, "eos_token_id": None}
PHASES = ("forward", "backward", "optimizer")


def token_former(width: int, layers: int, tokens: int, context: int, vocabulary: int = 256) -> TokenFormerConfig:
    """A TokenFormer with `tokens` parameter tokens a projection, and four times as many in the FFN."""
    return TokenFormerConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // HEAD),
        qkv_tokens=tokens,
        out_tokens=tokens,
        ffn_tokens=4 * tokens,
        max_position_embeddings=context,
        attn_implementation="sdpa",
        **NO_END,
    )


def build(config: PreTrainedConfig) -> nn.Module:
    """The model of a configuration, and a check that it is the one that was meant."""
    model = TokenFormerForCausalLM(config) if isinstance(config, TokenFormerConfig) else GPTNeoXForCausalLM(config)
    assert model.config._attn_implementation == "sdpa"
    return model


def pair(config: TokenFormerConfig) -> dict[str, nn.Module]:
    """Ours and the Transformer, by name."""
    models = {"tokenformer": build(config), "gpt-neox": build(equal_neox(config))}
    ours, theirs = (count(model) for model in models.values())
    assert abs(theirs / ours - 1) <= 0.02, f"{theirs} parameters against {ours}"
    return models


def count(model: nn.Module) -> int:
    """Parameters, each once."""
    return sum(parameter.numel() for parameter in model.parameters())


def shape_of(model: nn.Module, batch: int, context: int) -> dict[str, int]:
    """For the result file."""
    config = model.config
    shape = {"width": config.hidden_size, "layers": config.num_hidden_layers, "heads": config.num_attention_heads}
    if isinstance(config, TokenFormerConfig):
        shape |= {"qkv_tokens": config.qkv_tokens, "out_tokens": config.out_tokens, "ffn_tokens": config.ffn_tokens}
    return {**shape, "parameters": count(model), "vocabulary": config.vocab_size, "batch": batch, "context": context}


class Step:
    """Forward, backward, fused AdamW. Keeps the seconds that each phase took."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        self.phases: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def forward(self) -> torch.Tensor:
        """The loss."""
        raise NotImplementedError

    def update(self) -> None:
        """What follows the backward pass."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def __call__(self) -> None:
        marks = [time.perf_counter()]
        loss = self.forward()
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self.update()
        marks.append(time.perf_counter())
        for phase, began, ended in zip(PHASES, marks[:-1], marks[1:], strict=True):
            self.phases[phase].append(ended - began)

    def phase_medians(self, repeats: int) -> dict[str, float]:
        """Of the last `repeats` steps, which leaves the warm-up out."""
        return {phase: statistics.median(runs[-repeats:]) for phase, runs in self.phases.items()}


class TrainingStep(Step):
    """Of a language model."""

    def __init__(self, model: nn.Module, batch: int, context: int, *, chunked_loss: bool = False) -> None:
        super().__init__(model)
        self.chunked_loss = chunked_loss
        self.ids = torch.randint(0, model.config.vocab_size, (batch, context))

    def forward(self) -> torch.Tensor:
        if isinstance(self.model.config, TokenFormerConfig):
            self.model.config.chunked_loss = self.chunked_loss
        return self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss


def prepare_training(
    config: PreTrainedConfig, batch: int, context: int, chunked_loss: bool = False
) -> Callable[[], None]:
    """For memory.peak_of: building a model and its first two steps, after which its optimizer has its state.

    What a first step loads, and compiles if it does, is not the model's memory: a tiny step takes it before.
    """
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size = 1, 256
    TrainingStep(build(small), 1, 16, chunked_loss=chunked_loss)()

    def work() -> None:
        step = TrainingStep(build(config), batch, context, chunked_loss=chunked_loss)
        step()
        step()

    return work
