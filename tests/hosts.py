"""Small models of other families, with weights that hide nothing: no bias is zero, no norm's weight is one."""

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DeiTConfig,
    DeiTForImageClassification,
    DistilBertConfig,
    DistilBertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY, CONTEXT = 97, 40
# Width, heads, FFN; the second has an odd width and an FFN that is narrower than the model.
SIZES = [(36, 3, 50), (21, 3, 10)]


def _text(width, heads, ffn, **changes):
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "num_hidden_layers": 2}
    common |= {"bos_token_id": None, "eos_token_id": None}
    return {**common, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": ffn, **changes}


def _rotary(width, heads, ffn, **changes):
    """Rotary embedding turns channels in pairs, so a head has an even number of them."""
    return _text(width - width % (2 * heads), heads, ffn, **changes)


def _image(width, heads, ffn, **changes):
    shape = {"image_size": 16, "patch_size": 8, "num_labels": 7, "num_hidden_layers": 2}
    return {**shape, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": ffn, **changes}


def _gpt2(width, heads, ffn, **changes):
    common = {
        "vocab_size": VOCABULARY,
        "n_positions": CONTEXT,
        "n_layer": 2,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return {**common, "n_embd": width, "n_head": heads, "n_inner": ffn, **changes}


def _distilbert(width, heads, ffn, **changes):
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "n_layers": 2}
    return {**common, "dim": width, "n_heads": heads, "hidden_dim": ffn, **changes}


HOSTS = {
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, _rotary, {"rotary_pct": 1.0}),
    "gpt_neox, sequential": (
        GPTNeoXForCausalLM,
        GPTNeoXConfig,
        _rotary,
        {"rotary_pct": 1.0, "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast"},
    ),
    "gpt2": (GPT2LMHeadModel, GPT2Config, _gpt2, {}),
    "phi": (PhiForCausalLM, PhiConfig, _rotary, {"partial_rotary_factor": 1.0}),
    "vit": (ViTForImageClassification, ViTConfig, _image, {}),
    "deit": (DeiTForImageClassification, DeiTConfig, _image, {"hidden_act": "relu", "qkv_bias": False}),
    "bert": (BertForMaskedLM, BertConfig, _text, {}),
    "roberta": (RobertaForMaskedLM, RobertaConfig, _text, {"hidden_act": "silu"}),
    "distilbert": (DistilBertForMaskedLM, DistilBertConfig, _distilbert, {}),
    "llama": (LlamaForCausalLM, LlamaConfig, _rotary, {"num_key_value_heads": 1}),
    "mistral": (MistralForCausalLM, MistralConfig, _rotary, {"num_key_value_heads": 1, "head_dim": 14}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, _rotary, {"num_key_value_heads": 3}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, _rotary, {"num_key_value_heads": 1, "head_dim": 16}),
}
# Their norms stay, because a residual starts behind them: what eps leaves out cannot be made up for.
POST_NORM = ("bert", "roberta", "distilbert")
RMS_NORM = ("llama", "mistral", "qwen2", "qwen3")


def make_host(name, size=SIZES[0], **changes):
    """A model of a family in evaluation mode."""
    kind, config, shape, more = HOSTS[name]
    torch.manual_seed(0)
    model = kind(config(**shape(*size, **{**more, **changes})))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            is_norm = "norm" in path.lower() or ".ln_" in path
            if is_norm and path.endswith("weight"):
                parameter.uniform_(0.2, 3).mul_(torch.where(torch.rand_like(parameter) < 0.3, -1.0, 1.0))
            elif parameter.dim() == 1:
                parameter.normal_(std=0.5)
    return model.eval()


def embedded(model, dtype=torch.float64):
    """Inputs that want gradients: embeddings of random tokens, or images."""
    torch.manual_seed(1)
    config = model.config
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(3, 3, 16, 16, dtype=dtype, requires_grad=True)}
    # As small as new embeddings are, so that the norms' eps counts.
    return {"inputs_embeds": (0.02 * torch.randn(3, 9, config.hidden_size, dtype=dtype)).requires_grad_()}
