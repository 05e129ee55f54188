"""The TokenFormer ViT against transformers' ViT of equal parameters: images a second in training and in inference.

    python benchmarks/vision.py [--quick] [--repeats N] [--out FOLDER]

A step of training is forward with labels, backward, fused AdamW. Leaves: ratios of images per second, and of the memory
kept for the backward pass; benchmarks/results/vision.json. Images are ready tensors: data.md has the speed of decoding.
"""

import torch
from memory import kept_for_backward
from models import Step, count
from suite import Figure, Options, figure, run
from timing import in_turns
from torch import nn
from transformers import ViTForImageClassification

from tokenformer import TokenFormerForImageClassification, TokenFormerVisionConfig
from tokenformer.cost import equal_vit

OURS, THEIRS = "tokenformer", "vit"


class ImageStep(Step):
    """A training step on random images, or a look at them."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        super().__init__(model)
        config = model.config
        self.images = torch.randn(batch, config.num_channels, config.image_size, config.image_size)
        self.labels = torch.randint(0, config.num_labels, (batch,))

    def forward(self) -> torch.Tensor:
        return self.model(self.images, labels=self.labels).loss

    @torch.inference_mode()
    def look(self) -> None:
        """Inference."""
        self.model(self.images)


def shapes(quick: bool) -> list[tuple[str, TokenFormerVisionConfig, int]]:
    """Name, configuration and images a step. Grown models have the parameters of a wider ViT."""
    if quick:
        return [("tiny32", TokenFormerVisionConfig.preset("tiny32"), 2)]
    small = TokenFormerVisionConfig.preset("small32")
    tokens = {kind: 2 * getattr(small, kind) for kind in ("qkv_tokens", "out_tokens", "ffn_tokens")}
    found = [("small32", small, 64), ("small32 grown 2x", TokenFormerVisionConfig.preset("small32", **tokens), 64)]
    return found + [(name, TokenFormerVisionConfig.preset(name), 4) for name in ("b16-86m", "b16")]


def measure(options: Options) -> list[Figure]:
    """Both kinds of speed, and kept memory, at every shape."""
    figures = []
    for name, config, batch in shapes(options.quick):
        peer = equal_vit(config, heads=config.num_attention_heads)
        models = {OURS: TokenFormerForImageClassification(config), THEIRS: ViTForImageClassification(peer)}
        counts = {key: count(model) for key, model in models.items()}
        assert abs(counts[THEIRS] / counts[OURS] - 1) <= 0.02, counts
        assert {model.config._attn_implementation for model in models.values()} == {"sdpa"}
        steps = {key: ImageStep(model.train(), batch) for key, model in models.items()}
        details = {"batch": batch, "parameters": counts, "width": {k: m.config.hidden_size for k, m in models.items()}}
        kept = {key: kept_for_backward(s.forward, [*s.model.parameters(), s.images]) for key, s in steps.items()}
        training = in_turns(steps, options.repeats)
        for model in models.values():
            model.eval()
        inference = in_turns({key: step.look for key, step in steps.items()}, options.repeats)
        for what, times in (("training", training), ("inference", inference)):
            figures.append(
                figure(
                    f"images a second in {what} against ViT, {name}",
                    times.speedup(OURS, over=THEIRS),
                    at_least=1.0,
                    images_per_second={key: batch / median for key, median in times.medians.items()},
                    **details,
                )
            )
        at = f"memory kept for backward against ViT, {name}"
        figures.append(figure(at, kept[OURS] / kept[THEIRS], kept_bytes=kept, **details))
    return figures


if __name__ == "__main__":
    run(measure, __doc__)
