"""trl's trainers on a TokenFormer: SFT, DPO, GRPO and Reward take two steps, with and without an adapter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from conftest import make_tiny
from tokenformer import TokenFormerForSequenceClassification, adopt
from tokenformer.models.text import byte_tokenizer

trl = pytest.importorskip("trl")

TEXTS = ["to be or not to be", "that is the question", "whether 'tis nobler", "in the mind to suffer"]


@pytest.fixture
def tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@pytest.fixture
def settings(tmp_path):
    return {
        "output_dir": str(tmp_path), "max_steps": 2, "per_device_train_batch_size": 2, "report_to": "none",
        "save_strategy": "no", "use_cpu": True, "bf16": False, "learning_rate": 1e-3,
    }  # fmt: skip


@pytest.fixture(params=[False, True], ids=["whole", "adapter"])
def adapter(request):
    return {"peft_config": LoraConfig(r=2, target_modules="all-linear")} if request.param else {}


def train(trainer, adapter) -> None:
    """All tokens move, or those of the adapter alone."""
    assert isinstance(trainer.model, PeftModel) == bool(adapter)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert torch.isfinite(torch.tensor(trainer.state.log_history[-1]["train_loss"]))
    moved = {name for name, p in trainer.model.named_parameters() if p.ne(before[name]).any()}
    assert any("lora_B" in name if adapter else name.endswith("ffn.key_tokens") for name in moved)
    assert not adapter or all("lora_" in name or "modules_to_save" in name for name in moved)


def language_model():
    return make_tiny(vocab_size=257, pad_token_id=256, eos_token_id=256)


def test_supervised_fine_tuning(tokenizer, settings, adapter):
    rows = Dataset.from_dict({"text": TEXTS})
    arguments = trl.SFTConfig(**settings, max_length=32)
    model = language_model()
    train(trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer, **adapter), adapter)


def test_direct_preferences(tokenizer, settings, adapter):
    rows = Dataset.from_dict({"prompt": TEXTS, "chosen": [" yes"] * 4, "rejected": [" no"] * 4})
    arguments = trl.DPOConfig(**settings, max_length=64)
    # Without its adapter the model is its own reference.
    models = {"model": language_model(), **({} if adapter else {"ref_model": language_model()})}
    train(trl.DPOTrainer(**models, args=arguments, train_dataset=rows, processing_class=tokenizer, **adapter), adapter)


def test_group_relative_policies(tokenizer, settings, adapter):
    rows = Dataset.from_dict({"prompt": TEXTS})
    arguments = trl.GRPOConfig(**settings, num_generations=2, max_completion_length=8)
    train(
        trl.GRPOTrainer(
            language_model(),
            reward_funcs=lambda completions, **kwargs: [float(len(set(each))) for each in completions],
            args=arguments,
            train_dataset=rows,
            processing_class=tokenizer,
            **adapter,
        ),
        adapter,
    )


def test_rewards(tokenizer, settings, adapter):
    config = language_model().config
    config.num_labels = 1
    answered = {which: [f"{text}{word}" for text in TEXTS] for which, word in (("chosen", " yes"), ("rejected", " no"))}
    rows = Dataset.from_dict(answered)
    arguments = trl.RewardConfig(**settings, max_length=64)
    model = TokenFormerForSequenceClassification(config)
    train(trl.RewardTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer, **adapter), adapter)


@pytest.mark.parametrize("adopted", [False, True], ids=["native", "adopted"])
def test_the_command_trains_a_folder(tmp_path, tokenizer, adopted):
    """`trl sft` imports nothing of ours; the loader beside the weights does."""
    shape = {"vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": None}
    model = (
        adopt(GPT2LMHeadModel(GPT2Config(**shape, eos_token_id=256)).eval()) if adopted else make_tiny(vocab_size=257)
    )
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    Dataset.from_dict({"text": TEXTS * 4}).to_json(tmp_path / "data" / "train.jsonl")
    command = [str(Path(sys.executable).with_name("trl")), "sft", "--trust_remote_code"]
    command += ["--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "data")]
    command += ["--output_dir", str(tmp_path / "out"), "--max_steps", "2", "--max_length", "32", "--use_cpu"]
    command += ["--bf16", "false", "--report_to", "none", "--eval_strategy", "no", "--gradient_checkpointing", "false"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    trained = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(tmp_path / "model" / "model.safetensors")
    tokens = [name for name in before if name.endswith("value_tokens")]
    assert tokens
    assert all(not torch.equal(trained[name], before[name]) for name in tokens)
