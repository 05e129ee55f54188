"""What the tests of the page share: a run's folder with two stages of a tiny model, and hostile text."""

import torch

import tokenformer
from conftest import make_tiny
from tokenformer.models.text import byte_tokenizer

TEXT = "".join(f"{word} {number}\n" for number in range(9) for word in ("to be", "or not", "that is"))
HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{{sheet}}</style>"
    "\x00\x1b[31m\r\u202egnirts\u2066 שלום é 🎉\ufeff\u2028 &lt; ]]> `${1}` \\u003c \x7f"
)


def save_run(folder):
    """RUN/stage-1/model and RUN/stage-2/model, which has grown from it and whose new tokens do something."""
    small = make_tiny(vocab_size=257)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # the embedding of a new model is small, and all it expects is what it reads
        small.get_input_embeddings().weight.normal_(std=0.3, generator=generator)
    large = tokenformer.grow(small, factor=2)
    with torch.no_grad():
        for name, values in large.named_parameters():
            if name.endswith("value_tokens"):
                values.add_(torch.randn(values.shape, generator=generator) * 0.05)
    for number, model in enumerate((small, large), start=1):
        path = folder / f"stage-{number}" / "model"
        model.save_pretrained(path)
        byte_tokenizer().save_pretrained(path)
    return folder / "stage-2" / "model"
