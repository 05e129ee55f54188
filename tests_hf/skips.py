"""Which of transformers' tests are left out, and that no other leaves itself out."""

import unittest
from typing import ClassVar

from transformers.testing_utils import torch_device

EXPERTS = "is for mixtures of experts; TokenFormer has no experts"
COMPOSITE = "is for models made of several models; TokenFormer is one"
CONVERSION = "is for models whose checkpoints are renamed on loading; ours are loaded as they are"
FP32 = "is for parameters that a list keeps in fp32; our buffers do so themselves (WideBuffers)"

# Not for any TokenFormer.
SKIPPED = {
    "test_attn_implementation_composite_models": COMPOSITE,
    "test_can_load_from_already_mapped_keys": CONVERSION,
    "test_can_set_attention_dynamically_composite_model": COMPOSITE,
    "test_eager_matches_batched_and_grouped_inference_0_fp16": EXPERTS,
    "test_eager_matches_batched_and_grouped_inference_1_fp32": EXPERTS,
    "test_eager_matches_batched_and_grouped_inference_2_bf16": EXPERTS,
    "test_encoder_decoder_loss_no_double_shift": "is for encoder-decoders",
    "test_generation_tester_mixin_inheritance": "wants tests of generate() that the sdist does not contain",
    "test_internal_model_config_and_subconfig_are_same": COMPOSITE,
    "test_keep_in_fp32_modules": FP32,
    "test_keep_in_fp32_modules_exist": FP32,
    "test_moe_models_record_router_logits": EXPERTS,
    "test_output_router_logits_from_config": EXPERTS,
    "test_reverse_loading_mapping": CONVERSION,
    "test_sdpa_can_dispatch_composite_models": COMPOSITE,
    "test_sliding_window_mask": "is for sliding windows; TokenFormer attends to everything",
}


class OnlyTheseSkip:
    """Skips the tests of `skipped`. Any other that wants to skip itself fails, unless it is for other hardware."""

    skipped: ClassVar[dict[str, str]] = SKIPPED

    def setUp(self) -> None:
        if self._testMethodName in self.skipped:
            raise unittest.SkipTest(self.skipped[self._testMethodName])

    def skipTest(self, reason: str) -> None:  # noqa: N802
        """Called by a test that finds the model without what it tests: a fault, unless `skipped` says so."""
        if torch_device == "cpu":
            self.fail(f"the test wants to skip itself and is not in `skipped`: {reason}")
        super().skipTest(reason)

    def test_skipped_names_exist(self) -> None:
        assert [name for name in self.skipped if not hasattr(self, name)] == []
