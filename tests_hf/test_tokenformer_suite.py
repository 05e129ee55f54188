"""Runs transformers' own model tests over TokenFormerModel and TokenFormerForCausalLM.

    make test-hf

Saving, loading, tying, resizing, attention backends, gradient checkpointing, training, FSDP and tensor
parallelism are tested by transformers' code. This file tells it which classes to test, on which small model,
and which tests are not for a TokenFormer. Tests that need other hardware or packages skip themselves.
"""

import unittest
from typing import Any

import torch
from skips import EXPERTS, SKIPPED, OnlyTheseSkip
from tests import test_fsdp_mixin, test_tensor_parallel_mixin
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin, ids_tensor
from tests.test_training_mixin import TrainingTesterMixin
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from transformers.testing_utils import torch_device

from tokenformer import TokenFormerConfig, TokenFormerForCausalLM, TokenFormerModel

# The tests know a base model, which has no loss, by its name in this list.
MODEL_MAPPING_NAMES["tokenformer"] = "TokenFormerModel"
# transformers runs the tests with several processes for a few of its own models; None is every model.
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None

LANGUAGE_SKIPPED = {
    **SKIPPED,
    "test_fsdp2_expert_parallel_2d_vs_ddp": EXPERTS,
    "test_fsdp2_expert_parallel_bf16_grads": EXPERTS,
    "test_moe_parallel_plans_shard_experts": EXPERTS,
    "test_resize_position_vector_embeddings": "is for learned positions; ours are rotary",
    "test_tp_generation_quantized": "quantises nn.Linear layers with torchao; ours are Pattentions",
    "test_vision_axial_rope": "is for images; the language model's positions have one axis",
}


class ModelTester:
    """The small model and its inputs, under the names by which the tests ask for them."""

    base_model_class = TokenFormerModel
    causal_lm_class = TokenFormerForCausalLM
    is_training = True
    batch_size, seq_length = 3, 7
    # A quarter of each head is rotated, and NTK scaling divides by zero if that is only 2 dimensions.
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = 99, 32, 2, 2

    def get_config(self) -> TokenFormerConfig:
        return TokenFormerConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            # Odd, so that two processes cannot share the tokens evenly.
            qkv_tokens=25,
            out_tokens=23,
            ffn_tokens=97,
            max_position_embeddings=512,
            # The training test writes with tokens 1 to 19, and a prompt of padding would be masked.
            pad_token_id=0,
            eos_token_id=20,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[TokenFormerConfig, dict[str, Any]]:
        shape = (self.batch_size, self.seq_length)
        inputs = {
            "input_ids": ids_tensor(shape, self.vocab_size),
            # Padded on the right: 1, 2 and 3 tokens are real.
            "attention_mask": torch.ones(shape, dtype=torch.long, device=torch_device).tril(),
        }
        return self.get_config(), inputs


class TokenFormerTest(
    OnlyTheseSkip,
    ModelTesterMixin,
    TrainingTesterMixin,
    test_fsdp_mixin.FSDPTesterMixin,
    test_tensor_parallel_mixin.TensorParallelTesterMixin,
    unittest.TestCase,
):
    skipped = LANGUAGE_SKIPPED
    all_model_classes = (TokenFormerModel, TokenFormerForCausalLM)
    model_tester = ModelTester()
    _torch_compile_train_cls = TokenFormerForCausalLM
    # Else the test of initialisation runs only if the file of the configuration bears a recent copyright.
    test_can_init_all_missing_weights_before_2023 = True

    def test_config(self) -> None:
        ConfigTester(self, config_class=TokenFormerConfig, hidden_size=36).run_common_tests()
