"""`transformers serve` in a process of its own, which is told no more than --trust-remote-code."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from conftest import make_tiny
from tokenformer import adopt
from tokenformer.models.text import byte_tokenizer

for _package in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(_package)


@pytest.fixture(scope="module", params=[[], ["--continuous-batching"]], ids=["plain", "continuous"])
def server(tmp_path_factory, request):
    """The address of a server."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("server")
    command = ["-m", "transformers.cli.transformers", "serve", "--trust-remote-code", "--device", "cpu", *request.param]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules")}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command, "--port", str(port)], env=environment, stdout=log, stderr=log
        )
        try:
            for _ in range(240):
                try:
                    urllib.request.urlopen(f"http://localhost:{port}/health", timeout=9).close()
                    break
                except urllib.error.URLError:
                    assert process.poll() is None, (folder / "log").read_text()
                    time.sleep(0.5)
            yield f"http://localhost:{port}/v1"
        finally:
            process.terminate()
            process.wait()


def ask(server, folder, **request):
    what = "chat/completions" if "messages" in request else "completions"
    request = {"model": str(folder), "max_tokens": 8, "temperature": 0, **request}
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{server}/{what}", json.dumps(request).encode(), headers), timeout=120
    ) as answer:
        return answer.read().decode()


def gpt2():
    shape = {"vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return adopt(GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=256)).eval())


@pytest.mark.parametrize("make", [lambda: make_tiny(vocab_size=257, eos_token_id=256), gpt2], ids=["native", "adopted"])
def test_a_folder_is_served_whole_and_streamed(server, tmp_path, make):
    model, tokenizer = make(), byte_tokenizer()
    with torch.no_grad():  # the untrained model writes ASCII: a stream shows no character that stays incomplete
        model.get_input_embeddings().weight[128:] = 0
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer("To be, or not", return_tensors="pt")["input_ids"]
    written = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=256)[0, ids.shape[1] :]
    expected = tokenizer.decode(written, skip_special_tokens=True)
    prompt = "To be, or not"
    assert json.loads(ask(server, tmp_path, prompt=prompt))["choices"][0]["text"] == expected
    lines = [line.removeprefix("data: ") for line in ask(server, tmp_path, prompt=prompt, stream=True).splitlines()]
    pieces = [json.loads(line)["choices"][0]["text"] for line in lines if line.startswith("{")]
    assert "".join(pieces) == expected
    said = json.loads(ask(server, tmp_path, messages=[{"role": "user", "content": prompt}]))
    assert said["choices"][0]["message"]["content"] == expected
