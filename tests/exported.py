"""What tests of exported folders share: a small model, its own text, and the script of a folder's README."""

import re
import subprocess
import sys

import torch

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "qkv_tokens": 16, "out_tokens": 16, "ffn_tokens": 32}


def sure_of_itself(model):
    """With values so large that no rounding changes which token is the likeliest."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("value_tokens"):
                parameter.mul_(4)
    return model


def said_by(model) -> str:
    """What a README's script prints of a model of bytes: 20 tokens after its prompt."""
    ids = torch.tensor([list(b"The")])
    new = model.generate(ids, do_sample=False, max_new_tokens=20)[0, 3:]
    return bytes(new.tolist()).decode(errors="replace") + "\n"


def run_readme(folder, gone) -> str:
    """What the script prints in a process of its own, in which the packages that are `gone` cannot be imported."""
    (script,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    before = f"import sys; sys.modules.update(dict.fromkeys({list(gone)}))\n"
    ran = subprocess.run([sys.executable, "-c", before + script], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
