"""Makes transformers' model tests importable as the package `tests`.

They come with its source distribution, which `make test-hf` unpacks into .cache/hf. A few modules that they
import are left out of it; stand-ins take their place here.
"""

import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SUITE = Path(__file__).parent.parent / ".cache" / "hf" / f"transformers-{metadata.version('transformers')}"
MARKERS = (
    "accelerate_tests",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "is_fsdp_test",
    "is_tensor_parallel_test",
    "is_training_test",
    "slow",
    "torch_compile_test",
)


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", f"{marker}: transformers sorts its tests by it")


def stand_in(module_name: str, **contents: Any) -> None:
    """Let `from module_name import …` find `contents`."""
    module = ModuleType(module_name)
    vars(module).update(contents)
    sys.modules[module_name] = module


if not SUITE.is_dir():
    raise pytest.UsageError(f"{SUITE} is missing; `make test-hf` downloads it")
# Before our own tests/, which has the same name.
sys.path.insert(0, str(SUITE))

stand_in("tests.exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
stand_in("tests.generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
# What every configuration has to take, each value unlike its default.
stand_in(
    "tests.utils.test_configuration_utils",
    config_common_kwargs={
        "architectures": ["AnyModel"],
        "bos_token_id": 3,
        "chunk_size_feed_forward": 3,
        "dtype": "float16",
        "eos_token_id": 4,
        "id2label": {0: "no", 1: "yes", 2: "perhaps"},
        "is_encoder_decoder": True,
        "label2id": {"no": 0, "yes": 1, "perhaps": 2},
        "output_attentions": True,
        "output_hidden_states": True,
        "pad_token_id": 5,
        "problem_type": "regression",
        "return_dict": False,
        "tie_word_embeddings": False,
    },
)
