"""A server under load: 16 clients, 500 requests, and two times killed. `make test-serving` runs it.

Every request ends with its answer or with an error, answers are those of their groups, and memory stays flat.
"""

import collections
import itertools
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest

from serving_models import GROUPS, greedy, make_served, save_served

CLIENTS, REQUESTS, NEW = 16, 500, 24
KILLED_AFTER = (80, 160)  # requests
FLAT = 24 * 2**20  # bytes by which the last 200 requests may raise the memory of the process: 3 % of it
PROMPTS = ("hello", "To be, or not", "x", "the quick brown fox", "a long prompt " * 20)
NAMES = ("base", *(f"base:{name}" for name in GROUPS), "base:law+fr")
ARGUMENTS = ["--port", "{port}", "--running", "8", "--waiting", "4", "--max-prompt", "400", "--max-body", "20000"]


class Watched:
    """A server in a process of its own, which is started again after it was killed."""

    def __init__(self, folder):
        self.folder, self.starts = folder, 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        groups = [part for name in GROUPS for part in ("--tokens", f"{name}={self.folder / name}")]
        arguments = [part.format(port=self.port) for part in ARGUMENTS]
        command = [sys.executable, "-m", "tokenformer", "serve", str(self.folder / "base"), *groups, *arguments]
        self.log = (self.folder / f"log-{self.starts}").open("w+")
        self.starts += 1
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        for _ in range(600):
            try:
                if httpx.get(f"{self.address}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                assert self.process.poll() is None, self.said()
            time.sleep(0.2)
        raise AssertionError(self.said())

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.start()

    def memory(self):
        return psutil.Process(self.process.pid).memory_info().rss

    def said(self):
        self.log.seek(0)
        return self.log.read()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    save_served(folder)
    return folder


@pytest.fixture
def server(folder):
    server = Watched(folder)
    yield server
    server.process.kill()
    server.process.wait()


def test_five_hundred_requests(server):
    cases = list(itertools.product(NAMES, PROMPTS))
    served = make_served()
    expected = {case: greedy(served, *case, NEW) for case in cases}
    assert len({expected[name, PROMPTS[0]] for name in NAMES}) == len(NAMES)
    kinds = ["whole"] * 8 + ["stream"] * 6 + ["chat", "leaves", "malformed", "oversized", "too long", "unknown"]
    choice = random.Random(0)
    jobs = collections.deque((i, choice.choice(kinds), choice.choice(cases)) for i in range(REQUESTS))
    ended, wrong, retried, lock = {}, [], collections.Counter(), threading.Lock()
    memory = []

    def work():
        with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=60) as client:
            while True:
                with lock:
                    if not jobs:
                        return
                    number, kind, case = jobs.popleft()
                for _ in range(400):  # a client that is told to come back does
                    try:
                        outcome = ask(client, server.address, kind, case, expected[case])
                        break
                    except (openai.APIConnectionError, openai.RateLimitError, httpx.HTTPError) as error:
                        retried[type(error).__name__] += 1
                        time.sleep(0.3)
                else:
                    outcome = "gave up"
                with lock:
                    assert number not in ended
                    ended[number] = outcome
                    if outcome != "right":
                        wrong.append((number, kind, case, outcome))
                    if len(ended) in (REQUESTS - 200, REQUESTS - 100):
                        memory.append(server.memory())

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(work) for _ in range(CLIENTS)]
        for after in KILLED_AFTER:
            while len(ended) < after:
                assert not any(client.done() and client.exception() for client in clients)
                time.sleep(0.01)
            server.kill()
        for client in clients:
            client.result()
    memory.append(server.memory())
    print(f"again: {dict(retried)}; memory: {[round(bytes / 2**20) for bytes in memory]} MiB")
    assert sorted(ended) == list(range(REQUESTS))
    assert not wrong, wrong[:5]
    assert server.starts == 1 + len(KILLED_AFTER)
    assert retried, "nothing was refused or broke off: the test did not try what it is for"
    assert memory[-1] - memory[0] < FLAT, memory
    text = httpx.get(f"{server.address}/metrics").text
    assert "tokenformer_running 0.0" in text
    assert "tokenformer_waiting 0.0" in text
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=60) == 0, server.said()


def ask(client, address, kind, case, expected):
    """One request of a kind; "right" if it ended as it should. What is worth trying again raises."""
    model, prompt = case
    asked = {"model": model, "prompt": prompt, "max_tokens": NEW, "temperature": 0}
    if kind == "whole":
        return right(client.completions.create(**asked).choices[0].text, expected)
    if kind == "stream":
        said, ended = "", None
        for event in client.completions.create(**asked, stream=True):
            said += event.choices[0].text
            ended = event.choices[0].finish_reason or ended
            if not expected.startswith(said):
                return f"{said!r}, {expected!r} was expected"
        if ended is None:  # a stream that broke off is no answer
            raise openai.APIConnectionError(request=None)
        return right(said, expected)
    if kind == "chat":
        messages = [{"role": "user", "content": "hi"}]
        said = client.chat.completions.create(model=model, messages=messages, max_tokens=4, temperature=0)
        return right(said.usage.completion_tokens <= 4, True)
    if kind == "leaves":
        body = {**asked, "max_tokens": 100, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            if answer.status_code == 429:
                raise httpx.HTTPError("busy")
            next(answer.iter_lines())
        return "right"
    content, status = {
        "malformed": (b'{"model": "base", "prompt": ', 400),
        "oversized": (json.dumps({**asked, "prompt": "x" * 30_000}).encode(), 413),
        "too long": (json.dumps({**asked, "prompt": "x" * 401}).encode(), 400),
        "unknown": (json.dumps({**asked, "model": "base:none"}).encode(), 404),
    }[kind]
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{address}/v1/completions", content=content, headers=headers, timeout=60)
    if answer.status_code == 429:
        raise httpx.HTTPError("busy")
    return right((answer.status_code, "message" in answer.json()["error"]), (status, True))


def right(found, expected):
    return "right" if found == expected else f"{found!r}, {expected!r} was expected"


def test_sigterm_finishes_what_runs(server):
    """A real signal: the answer that runs is whole, the next one is refused, and the process ends with 0."""
    asked = {"model": "base", "prompt": "x", "max_tokens": 500, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{server.address}/v1/completions", json=asked, timeout=60)
        while "tokenformer_running 1.0" not in httpx.get(f"{server.address}/metrics").text:
            assert not answer.done()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        refused = httpx.post(f"{server.address}/v1/completions", json=asked)
        assert refused.status_code == 503
        assert answer.result().json()["usage"]["completion_tokens"] == 500
    assert server.process.wait(timeout=30) == 0, server.said()
