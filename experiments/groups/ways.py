"""The ways to teach a finished model a new text, each with adapters of three sizes, and the runs that try them.

Enters: what is known of rates so far. Leaves: runs, which begin with a finished model and train what stands beside it;
none as long as a rate is missing that they need.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lab.results import best
from lab.sizes import SEEDS, at_rates, initialised, models, rate_of, scratch
from lab.spec import Adapter, Run

Sizes = tuple[tuple[str, int], ...]

STEPS, WARMUP, DECAY = 300, 20, 100
BUDGETS = ("13k", "53k", "200k")  # parameters that learn
MIDDLE, ALL = BUDGETS[1], "all"
FACTOR = 3  # between rates
BASES = dict(zip(("TokenFormer", "GPT-NeoX"), models(64), strict=True))
TEXTS = ("python", "fiction")


@dataclass(frozen=True)
class Way:
    """What stands beside which model. `sizes` by budget: tokens or ranks of the roles."""

    base: str
    adapter: str
    sizes: dict[str, Sizes]
    rates: tuple[float, ...] = (1e-3, 3e-3, 9e-3)


def ffn(*tokens: int) -> dict[str, Sizes]:
    """Tokens beside the FFNs, for every budget."""
    return {budget: (("ffn", n),) for budget, n in zip(BUDGETS, tokens, strict=True)}


def everywhere(*numbers: tuple[int, int, int]) -> dict[str, Sizes]:
    """Tokens or ranks in the layers for query, key and value, behind the attention, and in the FFN."""
    return {
        budget: tuple(zip(("qkv", "out", "ffn"), each, strict=True))
        for budget, each in zip(BUDGETS, numbers, strict=True)
    }


OWN = "TokenFormer, tokens beside FFNs"
FULL = "TokenFormer, all weights"
# Tokens beside all layers: about half of them beside FFNs. On the TokenFormer whole ranks leave LoRA up to 4 % more
# parameters.
WAYS = {
    OWN: Way("TokenFormer", "own", ffn(13, 52, 195)),
    "TokenFormer, tokens beside FFNs, shared normaliser": Way("TokenFormer", "shared", ffn(13, 52, 195)),
    "TokenFormer, tokens beside all layers": Way("TokenFormer", "own", everywhere((2, 2, 5), (6, 6, 28), (24, 24, 99))),
    "TokenFormer, LoRA": Way("TokenFormer", "lora", everywhere((1, 2, 2), (6, 6, 6), (22, 22, 22))),
    FULL: Way("TokenFormer", "full", {ALL: ()}, rates=(3e-4, 1e-3, 3e-3)),
    "GPT-NeoX, tokens beside FFNs": Way("GPT-NeoX", "own", ffn(16, 64, 240)),
    "GPT-NeoX, tokens beside all layers": Way("GPT-NeoX", "own", everywhere((3, 3, 7), (11, 11, 31), (40, 40, 120))),
    "GPT-NeoX, LoRA": Way("GPT-NeoX", "lora", everywhere((2, 2, 2), (8, 8, 8), (30, 30, 30))),
    "GPT-NeoX, all weights": Way("GPT-NeoX", "full", {ALL: ()}, rates=(3e-4, 1e-3, 3e-3)),
}
# With all seeds at every budget on python, and tried on fiction too.
MAIN = tuple(way for way in WAYS if "shared" not in way and "all layers" not in way)


def ways_on(text: str) -> tuple[str, ...]:
    """Those that are tried on a text."""
    return tuple(WAYS) if text == TEXTS[0] else MAIN


def base(name: str, seed: int = 0) -> Run | None:
    """The finished model: the best from scratch of its size, chosen with the first seed; None until it is known."""
    rate, model = rate_of(BASES[name]), initialised(BASES[name])
    return None if rate is None or model is None else scratch(model, rate, seed)


def adapted(begins: Run, adapter: Adapter, text: str, lr: float) -> Run:
    """A finished model that learns a new text."""
    return Run(
        begins.model,
        float(f"{lr:.3g}"),  # thirds have no end
        STEPS,
        begins.seed,
        text=text,
        warmup=WARMUP,
        decay=DECAY / STEPS,
        weight_decay=0.0,
        batch=begins.batch,
        context=begins.context,
        begins=begins,
        adapter=adapter,
    )


def before(name: str, text: str, seed: int = 0) -> list[Run]:
    """The finished model as it is: one step at a rate of zero."""
    begins = base(name, seed)
    return [] if begins is None else [replace(adapted(begins, Adapter("full"), text, 0.0), steps=1, decay=1.0)]


def rated(way: str, budget: str, text: str) -> list[Run]:
    """A way at every rate, with the first seed."""
    begins, one = base(WAYS[way].base), WAYS[way]
    if begins is None:
        return []
    adapter = Adapter(one.adapter, one.sizes[budget])
    return at_rates(lambda lr: adapted(begins, adapter, text, lr), one.rates, FACTOR)


def seeded(way: str, budget: str, text: str) -> list[Run]:
    """A way at its best rate, with every seed that it is tried with; each has a base of its own."""
    chosen, name = best(rated(way, budget, text)), WAYS[way].base
    if chosen is None or chosen.adapter is None:
        return []
    bases = [base(name, seed) for seed in seeds(way, budget, text)]
    return [adapted(begins, chosen.adapter, text, chosen.lr) for begins in bases if begins is not None]


def seeds(way: str, budget: str, text: str) -> Sequence[int]:
    """All of them where the main ways are compared on python, and everywhere at the middle budget."""
    return SEEDS if budget in (MIDDLE, ALL) or (text == TEXTS[0] and way in MAIN) else SEEDS[:1]


def _last_two(n: int) -> Adapter:
    return Adapter("own", (("model.layers.2.ffn", 2 * n), ("model.layers.3.ffn", 2 * n)))


IDEAS: dict[str, Callable[[int], Adapter]] = {
    "twice the tokens beside the last two FFNs": _last_two,
    "keys that are hidden states of the new text": lambda n: Adapter("own", (("ffn", n),), keys="hidden"),
    "rate of values by 1/n, the whole of it at 26": lambda n: Adapter("own", (("ffn", n),), base=26),
}


def idea(name: str, budget: str) -> list[Run]:
    """A change to tokens beside FFNs, at their best rate and its neighbours; empty as long as that is not known."""
    chosen, text = best(rated(OWN, budget, TEXTS[0])), TEXTS[0]
    if chosen is None or chosen.begins is None:
        return []
    begins, adapter = chosen.begins, IDEAS[name](WAYS[OWN].sizes[budget][0][1])
    rates = (chosen.lr / FACTOR, chosen.lr, chosen.lr * FACTOR)
    return at_rates(lambda lr: adapted(begins, adapter, text, lr), rates, FACTOR)
