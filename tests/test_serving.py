"""The server, asked over loopback by OpenAI's client and httpx: answers, groups in one batch, limits, and its end."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", "5.22", reason="tokenformer serve refuses older ones")

from conftest import make_tiny
from serving_models import GROUPS, greedy, make_served, running
from tokenformer import BadRequestError, add_tokens, pattention_layers
from tokenformer.errors import BadResultError
from tokenformer.models.text import byte_tokenizer
from tokenformer.serving import Limits, Served, Server, batching, load_served
from tokenformer.serving.batching import Draw, check_machinery, perturbed
from tokenformer.serving.text import AnswerText

PROMPTS = ("hello", "To be, or not", "x", "the quick brown fox")
NAMES = ("base", "base:law", "base:fr", "base:law+fr")
LIMITS = Limits(running=8, waiting=8, prompt=400, body=20_000, choices=4)
GREEDY = {"temperature": 0, "max_tokens": 16}
MANY_TOKENS = 400


@pytest.fixture(scope="module")
def served():
    return make_served()


@pytest.fixture(scope="module")
def server(served):
    with running(served, limits=LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(served):
    """What every model answers to every prompt, one request at a time."""
    cases = [(name, prompt) for name in NAMES for prompt in PROMPTS]
    texts = {case: greedy(make_served(), *case, 16) for case in cases}
    assert len({texts[name, PROMPTS[0]] for name in NAMES}) == len(NAMES)  # clearly different
    return texts


def wait_until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def post(server, body, path="/v1/completions", **settings):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **settings.pop("headers", {})}
    return httpx.post(f"{server.address}{path}", content=content, headers=headers, timeout=60, **settings)


def test_requests_in_one_batch_have_their_own_groups(client, expected):
    def ask(case):
        name, prompt = case
        return client.completions.create(model=name, prompt=prompt, **GREEDY).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        assert dict(zip(expected, pool.map(ask, expected), strict=True)) == expected


def test_a_prompt_that_takes_several_steps(served, monkeypatch):
    """Positions of a prompt that has no token yet have its groups, too."""
    monkeypatch.setattr(batching, "STEP", 24)
    prompts = ["a long prompt, longer than a step: " * 3, "short"]
    expected = [greedy(make_served(), f"base:{name}", prompt, 16) for prompt in prompts for name in GROUPS]
    with running(make_served()) as server, openai.OpenAI(base_url=f"{server.address}/v1", api_key="none") as client:

        def ask(case):
            return client.completions.create(model=f"base:{case[1]}", prompt=case[0], **GREEDY).choices[0].text

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(ask, [(prompt, name) for prompt in prompts for name in GROUPS])) == expected


def test_whole_and_streamed_answers_are_the_same(client, expected):
    whole = client.completions.create(model="base:law", prompt="hello", **GREEDY)
    assert whole.choices[0].text == expected["base:law", "hello"]
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 16)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    events = list(client.completions.create(model="base:law", prompt="hello", **GREEDY, **stream))
    assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text
    assert len(events) > 5
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].usage == whole.usage
    assert not events[-1].choices


def test_a_chat_is_written_by_the_template(client, served):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    expected = greedy(make_served(), "base:fr", "user: Hi\nassistant: ", 16)
    said = client.chat.completions.create(model="base:fr", messages=messages, **GREEDY)
    assert said.choices[0].message.content == expected
    events = client.chat.completions.create(model="base:fr", messages=messages, **GREEDY, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events) == expected
    few = client.chat.completions.create(model="base", messages=messages, temperature=0, max_completion_tokens=3)
    assert few.usage.completion_tokens == 3


def test_several_answers_and_prompts(client, expected):
    found = client.completions.create(model="base", prompt=list(PROMPTS[:2]), n=2, **GREEDY)
    assert [choice.text for choice in found.choices] == [expected["base", PROMPTS[i]] for i in (0, 0, 1, 1)]
    ids = client.completions.create(model="base", prompt=list(b"hello"), **GREEDY)
    assert ids.choices[0].text == expected["base", "hello"]
    drawn = client.completions.create(model="base", prompt="hello", n=4, max_tokens=16, temperature=2, seed=1)
    assert len({choice.text for choice in drawn.choices}) == 4


def test_a_seed_draws_the_same_alone_and_in_a_crowd(client):
    def draw(seed):
        asked = {"prompt": "hello", "max_tokens": 16, "temperature": 1.5, "top_p": 0.9}
        return client.completions.create(model="base", seed=seed, **asked).choices[0].text

    alone = [draw(seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(draw, range(8)))[:4] == alone
    assert len(set(alone)) == 4


@pytest.mark.parametrize("stop", [":B", ["w*", "zz", "*Ba*C"]])
def test_nothing_comes_after_a_stop_string(client, expected, stop):
    whole = expected["base", "hello"]
    first = min(whole.find(one) for one in ([stop] if isinstance(stop, str) else stop) if one in whole)
    answer = client.completions.create(model="base", prompt="hello", stop=stop, **GREEDY)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (whole[:first], "stop")
    events = list(client.completions.create(model="base", prompt="hello", stop=stop, stream=True, **GREEDY))
    assert "".join(event.choices[0].text for event in events) == whole[:first]
    assert events[-1].choices[0].finish_reason == "stop"


def test_names_are_listed(client):
    assert [model.id for model in client.models.list()] == ["base", "base:law", "base:fr"]
    assert client.models.retrieve("base:law+fr").id == "base:law+fr"
    with pytest.raises(openai.NotFoundError, match="did you mean 'base:law'"):
        client.models.retrieve("base:laww")


ASKED = {"model": "base", "prompt": "hello", "max_tokens": 2}
CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
DEEP = b"[" * 5000


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b'{"model": "base", ', 400, "the request is not JSON"),
        (DEEP, 400, "the request is not JSON"),
        (b"\xff\xfe", 400, "the request is not JSON"),
        (b"[1, 2]", 400, "a JSON object is expected"),
        ({**ASKED, "prompt": "x" * 30_000}, 413, "larger than 20,000 bytes"),
        ({**ASKED, "prompt": "x" * 401}, 400, "401 tokens; at most 400"),
        ({**ASKED, "prompt": ""}, 400, "the prompt is empty"),
        ({**ASKED, "prompt": []}, 400, "the prompt is empty"),
        ({**ASKED, "prompt": [1, 999]}, 400, "token ids are from 0 to 256"),
        ({**ASKED, "prompt": ["a", 3]}, 400, "prompt"),
        ({**ASKED, "prompt": "\ud800"}, 400, "prompt"),
        ({"model": "base"}, 400, "prompt: Field required"),
        ({"prompt": "hello"}, 400, "model: Field required"),
        ({**ASKED, "model": "base:none"}, 404, "not served here"),
        ({**ASKED, "model": "bases"}, 404, "did you mean 'base'"),
        ({**ASKED, "max_tokens": 600}, 400, "at most 507 can follow"),
        ({**ASKED, "max_tokens": 0}, 400, "max_tokens"),
        ({**ASKED, "temperature": -1}, 400, "temperature"),
        ({**ASKED, "temperature": float("nan")}, 400, "temperature"),
        ({**ASKED, "top_p": 0}, 400, "top_p"),
        ({**ASKED, "n": 5}, 400, "5 answers"),
        ({**ASKED, "stop": [""]}, 400, "stop"),
        ({**ASKED, "stop": ["a"] * 5}, 400, "stop"),
        ({**ASKED, "temprature": 1}, 400, "did you mean 'temperature'"),
        ({**ASKED, "logprobs": 3}, 400, "logprobs is not supported"),
        ({**CHAT, "messages": []}, 400, "messages"),
        ({**CHAT, "messages": [{"role": "user"}]}, 400, "messages.0.content"),
        ({**CHAT, "messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role"),
        ({**CHAT, "tools": [{"type": "function"}]}, 400, "tools is not supported"),
    ],
)
def test_what_is_wrong_is_said_in_openai_s_form(server, body, status, says):
    path = "/v1/chat/completions" if isinstance(body, dict) and "messages" in body else "/v1/completions"
    answer = post(server, body, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert says in error["message"]
    assert "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"


def test_what_asks_for_nothing_is_taken(server):
    extra = {"logprobs": None, "presence_penalty": 0, "user": "me", "best_of": 1, "logit_bias": {}}
    assert post(server, {**ASKED, **extra}).status_code == 200


def test_who_may_ask(server):
    """A page of another site, in a browser on this machine, may not."""
    assert post(server, ASKED, headers={"Content-Type": "text/plain"}).status_code == 415
    assert post(server, ASKED, headers={"Host": "evil.example"}).status_code == 403
    assert post(server, ASKED, headers={"Host": f"localhost:{server.address.rpartition(':')[2]}"}).status_code == 200
    assert post(server, ASKED, "/v1/embeddings").json()["error"]["message"].startswith("POST /v1/embeddings")
    assert httpx.get(f"{server.address}/v1/completions").status_code == 405

    def pieces():  # no length is announced
        yield from [b" " * 1000] * 30

    answer = httpx.post(
        f"{server.address}/v1/completions", content=pieces(), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 413


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_goes_away_frees_its_place(server, stream):
    cancelled = server.engine.cancelled
    body = json.dumps({**ASKED, "max_tokens": MANY_TOKENS, "stream": stream, "n": 2, "seed": 0}).encode()
    head = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    head = "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""])
    with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: len(server.engine.answers) == 2)
    wait_until(lambda: not server.engine.answers)
    assert server.engine.cancelled == cancelled + 2
    scheduler = server.engine.manager.batch_processor.scheduler
    wait_until(lambda: not scheduler.active_requests)
    assert not scheduler.waiting_requests


def test_more_than_it_takes_is_refused(server):
    asked = {**ASKED, "max_tokens": 150, "temperature": 0, "n": 4}
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: post(server, asked), range(6)))
    codes = sorted(answer.status_code for answer in answers)
    assert codes.count(200) >= 4
    assert set(codes) == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.headers["Retry-After"]


def test_health_and_metrics(server):
    assert post(server, ASKED).status_code == 200
    assert httpx.get(f"{server.address}/health").json() == {"status": "ok"}
    text = httpx.get(f"{server.address}/metrics").text
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    assert values["tokenformer_generated_tokens_total"] >= 2
    assert values['tokenformer_requests_total{path="/v1/completions",status="200"}'] >= 1
    assert values["tokenformer_running"] == values["tokenformer_waiting"] == 0


def test_a_key_is_asked_for():
    with running(make_served(chat=False), key="s3cret") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            for path in ("/v1/models", "/metrics"):
                answer = httpx.get(f"{server.address}{path}", headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert httpx.get(f"{server.address}/health").status_code == 200
        with openai.OpenAI(base_url=f"{server.address}/v1", api_key="s3cret") as client:
            assert client.models.list().data[0].id == "base"
            with pytest.raises(openai.BadRequestError, match="has no chat template"):
                client.chat.completions.create(model="base", messages=CHAT["messages"])


def test_it_finishes_what_runs_and_then_ends():
    with running(make_served()) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, server, {**ASKED, "max_tokens": MANY_TOKENS, "temperature": 0})
        wait_until(lambda: server.engine.answers)
        server.drain()  # what SIGTERM does
        refused = post(server, ASKED)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_error")
        assert httpx.get(f"{server.address}/health").json() == {"status": "draining"}
        assert answer.result().json()["usage"]["completion_tokens"] == MANY_TOKENS
        wait_until(lambda: not server.engine.manager.is_running())


def test_a_step_that_fails_fails_the_request_and_ends_the_server(monkeypatch):
    served = make_served()
    server, ended = Server(served, port=0), []

    def run():
        try:
            server.run()
        except BadResultError as error:
            ended.append(str(error))

    def fail(*_, **__):
        raise ValueError("no memory left")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert post(server, ASKED).status_code == 200
        monkeypatch.setattr(served.model.model.norm, "forward", fail)
        answer = post(server, ASKED)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    finally:
        thread.join(timeout=60)
        server.drain()
        server.drain()
    assert len(ended) == 1


def test_what_is_not_served():
    model = make_tiny(vocab_size=257)
    add_tokens(model, "law", 4, where="lm_head")
    with pytest.raises(BadRequestError, match="beside the output layer"):
        Server(Served(model, byte_tokenizer(), "base", ("law",)), port=0)


def test_a_port_that_is_taken(served, server):
    with pytest.raises(BadRequestError, match="choose another --port"):
        Server(make_served(), port=int(server.address.rpartition(":")[2]))


def test_another_transformers_is_refused(monkeypatch):
    """Groups by position stand on parts of transformers that may change: then not one request is answered wrongly."""
    check_machinery()

    class Changed:
        def add_request(self, tokens):
            pass

    monkeypatch.setitem(batching.RELIED_ON, Changed.add_request, ("input_ids",))
    with pytest.raises(BadRequestError, match="add_request has no input_ids"):
        check_machinery()


def test_samples_follow_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -5.0])

    def shares(draw):
        drawn = [perturbed(logits, draw, position).argmax() for position in range(4000)]
        return torch.bincount(torch.stack(drawn), minlength=5) / 4000

    for draw, expected in (
        (Draw(seed=1), logits.softmax(0)),
        (Draw(temperature=0.5, seed=2), (2 * logits).softmax(0)),
        (Draw(top_k=2, seed=3), logits[:2].softmax(0)),
        (Draw(top_p=0.7, seed=4), logits[:2].softmax(0)),  # 0.64 alone is less than 0.7
        (Draw(top_p=1e-6, seed=5), torch.ones(1)),
    ):
        # Four standard deviations of a share of a half in 4000 draws.
        assert (shares(draw) - torch.nn.functional.pad(expected, (0, 5 - len(expected)))).abs().max() < 0.032


@given(st.text("ab:é", max_size=12), st.lists(st.text("ab:é", min_size=1, max_size=3), max_size=3))
def test_text_comes_whole_up_to_the_first_stop_string(text, stops):
    answer = AnswerText(byte_tokenizer(), stops)
    pieces = []
    for token in text.encode():
        pieces.append(answer.add(token))
        if answer.stopped:
            break
    pieces.append(answer.end())
    expected = text
    for end in range(len(text) + 1):  # as a reader who sees one character more each time would stop
        found = [at for stop in stops if (at := text[:end].find(stop)) >= 0]
        if found:
            expected = text[: min(found)]
            break
    assert "".join(pieces) == expected
    assert "\ufffd" not in "".join(pieces)


def test_a_folder_is_served_in_eight_bits(tmp_path):
    model = make_tiny(vocab_size=256)
    model.save_pretrained(tmp_path / "whole")
    served = load_served(tmp_path / "whole", int8=True)
    assert all(layer.num_quantised == layer.num_tokens for _, layer in pattention_layers(served.model))
    served.model.save_pretrained(tmp_path / "integers")
    again = load_served(tmp_path / "integers", int8=True)  # nothing is left to quantise
    assert again.model.config.quantization_config.dtype == "int8"
    with running(again) as server:
        asked = {"model": "integers", "prompt": "hello", **GREEDY}
        answer = httpx.post(f"{server.address}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
