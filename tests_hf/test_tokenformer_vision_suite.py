"""Runs transformers' own model tests over TokenFormerVisionModel and TokenFormerForImageClassification.

    make test-hf

As test_tokenformer_suite.py does for the language model. Training and several processes are tested by transformers for
language models only.
"""

import unittest
from typing import Any

from skips import SKIPPED, OnlyTheseSkip
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin, floats_tensor
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from tokenformer import TokenFormerForImageClassification, TokenFormerVisionConfig, TokenFormerVisionModel

# The tests know a base model, which has no loss, by its name in this list.
MODEL_MAPPING_NAMES["tokenformer_vision"] = "TokenFormerVisionModel"

ROPE = "is for rotary embeddings; positions of patches are learned or fixed"
TEXT = "is for models of text"

VISION_SKIPPED = {
    **SKIPPED,
    "test_causal_lm_loss_honors_shift_labels": TEXT,
    "test_inputs_embeds": TEXT,
    "test_inputs_embeds_matches_input_ids": TEXT,
    "test_model_rope_scaling_frequencies": ROPE,
    "test_model_rope_scaling_from_config_0_linear": ROPE,
    "test_model_rope_scaling_from_config_1_dynamic": ROPE,
    "test_model_rope_scaling_from_config_2_yarn": ROPE,
    "test_model_rope_with_partial_rotation": ROPE,
    "test_resize_embeddings_untied": TEXT,
    "test_resize_embeddings_untied_no_reinit_on_post_init": TEXT,
    "test_resize_position_vector_embeddings": TEXT,
    "test_resize_tokens_embeddings": TEXT,
    "test_vision_axial_rope": ROPE,
}


class ModelTester:
    """The small model and its inputs, under the names by which the tests ask for them."""

    is_training = True
    batch_size, image_size, num_channels = 3, 24, 3
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4
    # Nine patches and the class token.
    seq_length = encoder_seq_length = 10

    def get_config(self) -> TokenFormerVisionConfig:
        return TokenFormerVisionConfig(
            image_size=self.image_size,
            patch_size=8,
            num_channels=self.num_channels,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            qkv_tokens=25,
            out_tokens=23,
            ffn_tokens=97,
            num_labels=5,
            # The suite compares hidden states before the final norm in fp16 by absolute tolerances. With the paper's
            # values those of so narrow a model reach 6, where fp16 has steps of 0.004.
            value_initializer_range=0.02,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[TokenFormerVisionConfig, dict[str, Any]]:
        shape = [self.batch_size, self.num_channels, self.image_size, self.image_size]
        return self.get_config(), {"pixel_values": floats_tensor(shape)}


class TokenFormerVisionTest(OnlyTheseSkip, ModelTesterMixin, unittest.TestCase):
    skipped = VISION_SKIPPED
    all_model_classes = (TokenFormerVisionModel, TokenFormerForImageClassification)
    model_tester = ModelTester()
    test_resize_embeddings = False
    # Else the test of initialisation runs only if the file of the configuration bears a recent copyright.
    test_can_init_all_missing_weights_before_2023 = True

    def test_model_get_set_embeddings(self) -> None:
        """In place of transformers' test, which is for the embeddings of text."""
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            assert isinstance(model.get_input_embeddings(), nn.Conv2d)
            new = nn.Conv2d(3, 32, 8)
            model.set_input_embeddings(new)
            assert model.get_input_embeddings() is new
            assert model.get_output_embeddings() is None

    def test_config(self) -> None:
        ConfigTester(
            self, config_class=TokenFormerVisionConfig, has_text_modality=False, hidden_size=36
        ).run_common_tests()
