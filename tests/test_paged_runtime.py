"""What vLLM's Transformers backend asks of a model, without vLLM: built on the meta device by its Auto class, filled by
name, and run on packed sequences with an attention function, and a cache, that are not transformers'.

docs/inference.md says what of it is from vLLM's documentation.
"""

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from conftest import make_tiny, relative_error
from hosts import make_host
from tokenformer import adopt, grow


class Layer:
    """The attention of one layer: keys and values of every sequence, kept here and nowhere else."""

    def __init__(self):
        self.kept = {}

    def __call__(self, query, key, value, scale, sequences):
        """[heads, packed tokens, d] in, [packed tokens, heads · d] out. `sequences`: whose token each is."""
        attended = []
        for name in dict.fromkeys(sequences):
            own = torch.tensor([one == name for one in sequences])
            before = self.kept.get(name)
            kept = [tensor[:, own] for tensor in (key, value)]
            self.kept[name] = (
                kept if before is None else [torch.cat(pair, 1) for pair in zip(before, kept, strict=True)]
            )
            keys, values = (each.repeat_interleave(len(query) // len(each), 0) for each in self.kept[name])
            new, length = own.sum().item(), keys.shape[1]
            causal = torch.ones(new, length, dtype=torch.bool).tril(length - new)
            attended.append(F.scaled_dot_product_attention(query[:, own], keys, values, causal, scale=scale))
        return torch.cat(attended, 1).transpose(0, 1).flatten(1)


def paged(module, query, key, value, attention_mask, scaling=None, attention_instances=None, sequences=None, **kwargs):
    assert attention_mask is None  # what may see what is not the model's business
    attend = attention_instances[module.layer_idx]
    return attend(query[0], key[0], value[0], scaling, sequences), None


def built(folder, monkeypatch):
    """The base model of a folder: only buffers are computed, and weights and buffers that are saved come from there."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "paged", paged)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config._attn_implementation = "paged"
    with init_empty_weights(include_buffers=False):
        model = AutoModel.from_config(config, trust_remote_code=True).eval()
    assert model.is_backend_compatible()
    assert all(parameter.is_meta for parameter in model.parameters())
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="cpu")))
    known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    weights = load_file(folder / "model.safetensors")
    rest = dict(weights)
    for name in weights:
        inner = name.removeprefix(f"{model.base_model_prefix}.")
        if inner in known:
            known.pop(inner).data.copy_(rest.pop(name))
    assert set(rest) <= {"lm_head.weight", "embed_out.weight"}
    assert not [name for name in known if name in dict(model.named_parameters())]
    head = next(iter(rest.values()), model.get_input_embeddings().weight)
    return model, head


MODELS = {
    "native": make_tiny,
    "grown": lambda: grow(make_tiny(), 2, method="zero"),  # its tau is not that of its size
    "gpt_neox": lambda: adopt(make_host("gpt_neox")),
    "qwen2": lambda: adopt(make_host("qwen2")),
    "llama": lambda: adopt(make_host("llama")),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_with_a_cache_of_another_runtime(tmp_path, monkeypatch, name):
    whole = MODELS[name]()
    whole.save_pretrained(tmp_path)
    model, head = built(tmp_path, monkeypatch)
    attention = {i: Layer() for i in range(model.config.get_text_config().num_hidden_layers)}

    def step(tokens):
        """Logits for new tokens of several sequences, by sequence."""
        sequences = [name for name, (_, ids) in tokens.items() for _ in ids]
        positions = torch.tensor([[seen + i for seen, ids in tokens.values() for i in range(len(ids))]])
        packed = torch.tensor([[i for _, ids in tokens.values() for i in ids]])
        more = {"attention_instances": attention, "sequences": sequences, "use_cache": False, "return_dict": False}
        if len(sequences) % 2:  # by embeddings, as the later stages of a pipeline
            packed = {"inputs_embeds": model.get_input_embeddings()(packed)}
        else:
            packed = {"input_ids": packed}
        hidden = model(**packed, position_ids=positions, **more)[0][0]
        logits = hidden @ head.T
        return {name: logits[torch.tensor([one == name for one in sequences])] for name in tokens}

    texts = {"a": [5, 17, 3, 60, 44, 9, 8], "b": [71, 2, 2, 19]}
    found = {name: [] for name in texts}
    for seen, until in ((0, 2), (2, 3), (3, 4)):
        for name, logits in step({name: (seen, ids[seen:until]) for name, ids in texts.items()}).items():
            found[name].append(logits)
    found["a"].append(step({"a": (4, texts["a"][4:])})["a"])  # a prompt in pieces, and one sequence has ended
    for name, ids in texts.items():
        assert relative_error(torch.cat(found[name]), whole(torch.tensor([ids])).logits[0]) < 1e-5


@torch.no_grad()
def test_stages_of_a_pipeline(tiny):
    """The parts that a stage lacks pass on what they get, as nn.Identity does; the cut is where the plan says."""
    ids = torch.randint(256, (1, 9))
    want, model = tiny(ids).logits, tiny.model
    assert set(model.config.base_model_pp_plan) <= dict(model.named_children()).keys()

    class Missing(nn.Identity):
        def forward(self, first, *rest, **kwargs):
            return first

    parts = model.layers, model.norm
    model.layers, model.norm = nn.ModuleList([parts[0][0], Missing()]), Missing()
    hidden = model(ids).last_hidden_state
    model.layers, model.norm = nn.ModuleList([Missing(), parts[0][1]]), parts[1]
    assert relative_error(tiny.lm_head(model(inputs_embeds=hidden).last_hidden_state), want) < 1e-5
