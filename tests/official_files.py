"""Small checkpoints in the authors' format, their formula in plain torch, and what a refusal is."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tokenformer import TokenFormerForCausalLM

# Odd sizes: every dimension that could be mistaken for another has its own number.
SETTINGS = {
    "num_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "qkv_slot_num": 5,
    "proj_slot_num": 7,
    "ffn_slot_num": 11,
    "max_position_embeddings": 32,
    "pos_emb": "rotary",
    "rotary_pct": 0.25,
    "no_weight_tying": False,
    "norm": "layernorm_nonparam",
    "final_norm": "layernorm",
    "gpt_j_residual": False,
    "norm_activation_type": "l2_norm_gelu",
}
ROWS = 37

# What the authors' files hold besides: other keys, hyphens, comments, a comma too many, a key twice.
TRAINING = """
  "attention_config": [[["tokenformer"], 3]], # a comment
  "optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.95],}},
  "tokenizer-type": "HFTokenizer",
  "use_wandb": False,
  "hidden_size": 48,
"""


def official_tensors(settings: dict, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> dict[str, Tensor]:
    """Random weights by the authors' names."""
    layers, d = settings["num_layers"], settings["hidden_size"]
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    counts = {f"attention.{name}": settings["qkv_slot_num"] for name in ("query", "key", "value")}
    counts |= {"attention.proj": settings["proj_slot_num"], "mlp": settings["ffn_slot_num"]}
    tensors = {"sequential.0.word_embeddings.weight": draw(rows, d)}
    for i in range(layers):
        for name, n in counts.items():
            # Scores of about 1: if all of a row's are far below 0, GeLU leaves nothing to normalise.
            tensors[f"sequential.{i + 2}.{name}.key_param_tokens"] = draw(n, d, scale=d**-0.5)
            tensors[f"sequential.{i + 2}.{name}.value_param_tokens"] = draw(n, d)
    tensors[f"sequential.{layers + 3}.norm.weight"] = draw(d)
    tensors[f"sequential.{layers + 3}.norm.bias"] = draw(d)
    if settings["no_weight_tying"]:
        tensors[f"sequential.{layers + 4}.final_linear.weight"] = draw(rows, d)
    return tensors


def write_official(
    folder: Path, tensors: dict[str, Tensor] | None = None, dtype: torch.dtype = torch.float32, **changes
) -> tuple[Path, Path]:
    """CHECKPOINT.bin and CONFIG.yml for SETTINGS with `changes`; None leaves a setting out."""
    settings = {key: value for key, value in {**SETTINGS, **changes}.items() if value is not None}
    checkpoint, config = folder / "official.bin", folder / "official.yml"
    torch.save(official_tensors({**SETTINGS, **changes}, dtype) if tensors is None else tensors, checkpoint)
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in settings.items()]
    training = TRAINING if "hidden_size" in settings else TRAINING.replace('"hidden_size": 48,', "")
    config.write_text("{" + training + "\n".join(lines) + "\n}\n")
    return checkpoint, config


def official_logits(tensors: dict[str, Tensor], settings: dict, ids: Tensor) -> Tensor:
    """The authors' model, straight from their tensors: [batch, length] -> [batch, length, rows]."""
    layers, d, heads = settings["num_layers"], settings["hidden_size"], settings["num_attention_heads"]
    eps, head = settings.get("layernorm_epsilon", 1e-5), d // heads
    length = ids.shape[1]

    def pattention(x: Tensor, name: str) -> Tensor:
        keys, values = tensors[f"{name}.key_param_tokens"], tensors[f"{name}.value_param_tokens"]
        a, n = x @ keys.T, keys.shape[0]
        kind = settings["norm_activation_type"]
        if kind == "l2_norm_gelu":
            weights = F.gelu(a / a.norm(dim=-1, keepdim=True) * math.sqrt(n))
        elif kind == "gelu_l2_norm":
            weights = F.gelu(a) / F.gelu(a).norm(dim=-1, keepdim=True) * math.sqrt(n)
        else:
            weights = a.exp() / a.exp().sum(dim=-1, keepdim=True) * n
        return weights @ values

    def rotate(x: Tensor) -> Tensor:  # [batch, length, heads, head]
        rotated = int(head * settings["rotary_pct"])
        frequencies = settings.get("rotary_emb_base", 10000) ** -(torch.arange(0, rotated, 2).to(x) / rotated)
        angles = torch.outer(torch.arange(length).to(x), frequencies)  # [length, rotated / 2]
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        turn, stay = x[..., :rotated], x[..., rotated:]
        first, second = turn.chunk(2, dim=-1)
        turned = turn * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
        return torch.cat((turned, stay), dim=-1)

    x = tensors["sequential.0.word_embeddings.weight"][ids]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    for i in range(layers):
        layer, normed = f"sequential.{i + 2}", F.layer_norm(x, (d,), eps=eps)
        query, key, value = (
            pattention(normed, f"{layer}.attention.{part}").unflatten(-1, (heads, head))
            for part in ("query", "key", "value")
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", rotate(query), rotate(key)) / math.sqrt(head)
        attention = scores.masked_fill(future, -math.inf).softmax(dim=-1)
        attended = torch.einsum("bhqk,bkhd->bqhd", attention, value).flatten(-2)
        x = x + pattention(attended, f"{layer}.attention.proj")
        x = x + pattention(F.layer_norm(x, (d,), eps=eps), f"{layer}.mlp")
    norm = f"sequential.{layers + 3}.norm"
    x = F.layer_norm(x, (d,), tensors[f"{norm}.weight"], tensors[f"{norm}.bias"], eps)
    output = "sequential.0.word_embeddings.weight"
    if settings["no_weight_tying"]:
        output = f"sequential.{layers + 4}.final_linear.weight"
    return x @ tensors[output].T


def write_tokenizer(path: Path, entries: int, end_of_text: str = "<|endoftext|>") -> Path:
    """A word-level tokenizer.json with `entries` entries."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [end_of_text, "[UNK]", *(f"w{i}" for i in range(entries - 2))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
    return path


def refused(tmp_path, error, message, work):
    """`work` raises one line that matches, and the folder holds what it held."""
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    folders = {path for path in tmp_path.rglob("*") if path.is_dir()}
    with pytest.raises(error) as caught:
        work()
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert {path for path in tmp_path.rglob("*") if path.is_dir()} == folders


def fail_after_saving(monkeypatch, error: BaseException) -> None:
    """Let every import raise `error` when the model has been written and the folder has not its name yet."""
    save = TokenFormerForCausalLM.save_pretrained

    def save_and_fail(model, folder, *arguments, **options):
        save(model, folder, *arguments, **options)
        assert (folder / "model.safetensors").is_file()
        raise error

    monkeypatch.setattr(TokenFormerForCausalLM, "save_pretrained", save_and_fail)
