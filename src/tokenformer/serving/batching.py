"""What happens around each step of transformers' continuous batching: groups and sizes by position, and sampling.

Enters: before a step, the requests that transformers has laid end to end, with what each asked for; after it, the
logits of their last positions. Leaves: the model, set to the groups and the size of every position; logits whose
largest is the token that each request draws.

transformers asks an object of its own kind, `ContinuousBatchingLogitsProcessorList`, at both moments, and a manager
takes it from its attribute `logit_processor` when it starts. Ours stands there. Its own processors apply one seed to
everything and cannot be greedy for one request only.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestState
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.requests import FutureRequestState

from ..errors import BadRequestError, one_line
from ..memory import GIB, machine_memory
from ..pattention.groups import switch_of
from ..pattention.sizes import sizes_of
from .limits import Limits

PAGE = 32  # positions of the cache that are given out at once
STEP = 512  # the most positions in one step: longer prompts take several
SHARE_OF_MEMORY = 4  # the cache takes at most a quarter of it, unless it is told
MEMORY = 4 * GIB  # where the system does not say
# What of transformers this room relies on, beyond what its documentation names.
RELIED_ON: dict[Any, tuple[str, ...]] = {
    ContinuousBatchingLogitsProcessorList.prepare_tensor_args: ("requests_in_batch", "arg_storage"),
    ContinuousBatchingLogitsProcessorList.check_kwargs: ("kwargs",),
    ContinuousBatchingLogitsProcessorList.__call__: ("input_ids", "scores", "logits_processor_args"),
    ContinuousBatchingConfig.__init__: ("page_size", "max_requests_per_batch", "allow_block_sharing", "safety_margin"),
    ContinuousBatchingManager.add_request: ("input_ids", "request_id", "max_new_tokens", "streaming", "eos_token_id"),
    ContinuousBatchingManager.get_result: ("timeout",),
    ContinuousBatchingManager.cancel_request: ("request_id",),
    FutureRequestState.__init__: ("state", "has_new_token", "query_length"),
    RequestState.__init__: ("initial_tokens", "generated_tokens", "logit_processor_kwargs"),
}


@dataclass(frozen=True)
class Draw:
    """How a request draws its tokens. The same seed draws the same, whatever else is in the batch."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


class AroundSteps(ContinuousBatchingLogitsProcessorList):
    """Stands where transformers keeps its logits processors.

    A request carries `draw`, `groups` and `size` among its arguments for processors.
    """

    def __init__(self, model: nn.Module, always: Sequence[str]) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self.switch, self.sizes, self.always = switch_of(model), sizes_of(model), tuple(always)
        self.drawing: list[Any] = []  # the requests of this step that get a token, in the order of its logits

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Nothing to check: only the engine adds requests."""

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        """Before a step: which request has which positions, and who draws."""
        self.drawing = [request.state for request in requests_in_batch if request.has_new_token]
        asked = [request.state.logit_processor_kwargs for request in requests_in_batch]
        lengths = [request.query_length for request in requests_in_batch]
        if self.switch is not None:
            self.switch.set_rows([(*self.always, *one["groups"]) for one in asked], lengths)
        if self.sizes is not None:
            self.sizes.set_rows([one["size"] for one in asked], lengths)
        return arg_storage

    def __call__(self, input_ids: Any, scores: Any, logits_processor_args: Tensor) -> Any:
        """After it: scores [requests, vocabulary] whose largest is the token that is drawn."""
        for row, state in zip(scores, self.drawing, strict=False):  # rows of requests without a token come last
            draw = state.logit_processor_kwargs["draw"]
            if draw.temperature > 0:
                position = len(state.initial_tokens) + len(state.generated_tokens)
                row.copy_(perturbed(row, draw, position))
        return scores


def perturbed(logits: Tensor, draw: Draw, position: int) -> Tensor:
    """Logits [vocabulary] plus Gumbel noise: the largest is a sample of their softmax.

    The noise depends on the seed and the position only.
    """
    logits = logits / draw.temperature
    if 0 < draw.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(draw.top_k).values[-1], -torch.inf)
    if draw.top_p < 1:
        sorted_logits, order = logits.sort(descending=True)
        shares = sorted_logits.softmax(dim=-1)
        dropped = shares.cumsum(dim=-1) - shares >= draw.top_p  # by what stands before it: the first always stays
        dropped[0] = False
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter_(0, order, dropped), -torch.inf)
    generator = torch.Generator().manual_seed((draw.seed * 0x9E3779B97F4A7C15 + position) % 2**63)
    noise = torch.empty(len(logits)).exponential_(generator=generator).log_().neg_()
    return logits + noise.to(logits.device)


def new_manager(model: PreTrainedModel, always: Sequence[str], limits: Limits, context: int, stop_ids: Any) -> Any:
    """transformers' manager of continuous batching for a model, with what happens around its steps; not started.

    Blocks of the cache are not shared between prompts that begin alike: transformers compares their tokens only, and
    under other groups the same tokens have other keys and values.
    """
    check_machinery()
    output: Any = model.get_output_embeddings()
    if output is not None and any("token_groups" in name for name, _ in output.named_modules()):
        raise BadRequestError(
            "a token group stands beside the output layer, which a server computes for some positions only; put it "
            "beside other layers"
        )
    whole = limits.cache_bytes or (machine_memory() or MEMORY) // SHARE_OF_MEMORY
    positions = min(limits.running * context, max(context, whole // bytes_by_position(model)))
    settings = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=-(-positions // PAGE) + limits.running,  # of each request a page is filled in part
        max_batch_tokens=STEP,
        max_requests_per_batch=limits.running,
        allow_block_sharing=False,
        use_async_batching=False,
        use_cuda_graph=False,
        auto_switch_to_flash=False,
        safety_margin=0.0,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=stop_ids, pad_token_id=0, max_new_tokens=1)
    try:
        manager: Any = model.init_continuous_batching(generation, settings)  # type: ignore[operator]
    except ValueError as error:  # an attention that has no paged form
        raise BadRequestError(f"{type(model).__name__} cannot be batched continuously: {one_line(error)}") from error
    manager.logit_processor = AroundSteps(model, always)
    return manager


def bytes_by_position(model: PreTrainedModel) -> int:
    """What the keys and values of one position take in all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize


def check_machinery() -> None:
    """Refuse a version of transformers whose continuous batching is not the one that this was written for."""
    for function, names in RELIED_ON.items():
        missing = set(names) - set(inspect.signature(function).parameters)
        if missing:
            raise BadRequestError(
                f"transformers {transformers.__version__} batches in another way: {function.__qualname__} has no "
                f"{', '.join(sorted(missing))}; install transformers 5.22 or 5.23"
            )
