"""The live page's answers: they are those of `ablate`, no request changes another, and wrong ones are refused."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

pytest.importorskip("transformers", "5.22", reason="the server's machinery needs it")

from inspecting_models import HOSTILE, TEXT, save_run
from tokenformer import BadRequestError, ablate
from tokenformer.inspecting import load_inspection
from tokenformer.inspecting.live import Live
from tokenformer.inspecting.live_server import LiveServer

IDS = list(TEXT.encode()[:100])


@pytest.fixture(scope="module")
def inspection(tmp_path_factory):
    return load_inspection(save_run(tmp_path_factory.mktemp("run")), prompt=TEXT.encode())


@pytest.fixture(scope="module")
def live(inspection):
    return Live(inspection)


@pytest.fixture(scope="module")
def address(inspection):
    server = LiveServer(inspection, port=0)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server.address
    server.drain()
    server.drain()
    thread.join(timeout=60)
    assert not thread.is_alive()


def shares(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].softmax(-1)


def test_an_answer_is_that_of_an_ablated_model(live):
    model, names = live.subject.model, [layer.name for layer in live.subject.layers]
    answer = live.answer(IDS, [(4, 3, None), (4, 5, None), (9, 7, 2.5)], [])
    with ablate(model, {names[4]: [3, 5]}), ablate(model, {names[9]: {7: 2.5}}):
        expected = shares(model, IDS)
    for part, found in ((answer["after"], expected), (answer["before"], shares(model, IDS))):
        assert [share for _, share in part["next"]] == pytest.approx(found.topk(6).values.tolist(), abs=1e-4)
    assert answer["before"]["next"] != answer["after"]["next"]
    assert set(answer["words"]) >= {one for one, _ in answer["after"]["next"]}


def test_a_growth_step_can_be_switched_off(live):
    model = live.subject.model
    new = {name: (ages == 1).nonzero().flatten().tolist() for name, ages in live.subject.ages.items()}
    with ablate(model, new):
        expected = shares(model, IDS).topk(6).values.tolist()
    assert [share for _, share in live.answer(IDS, [], ["step:1"])["after"]["next"]] == pytest.approx(
        expected, abs=1e-4
    )
    change = live.change(IDS, [], ["step:1"])["change"]
    assert len(change) == len(IDS)
    assert change[0] == 0
    assert any(change)


def test_requests_do_not_change_each_other(live):
    states = [[], [(4, 3, None)], [(4, 3, 3.0), (9, 1, 0.0)], [(7, 2, -2.0)]]
    alone = [live.answer(IDS, state, [])["after"] for state in states]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda i: live.answer(IDS, states[i % 4], [])["after"], range(16)))
    assert together == alone * 4
    with pytest.raises(BadRequestError):
        live.answer(IDS, [(4, 3, None), (4, 10**6, None)], [])
    assert live.answer(IDS, [], ["step:1"])["before"] == live.answer(IDS, [], [])["after"] == alone[0]


def test_the_weights_of_a_token_and_another_text(live, address):
    weights = live.token(IDS, 4, 3)["weights"]
    assert len(weights) == len(IDS)
    sheet = httpx.post(f"{address}/api/sheet", json={"text": HOSTILE}, timeout=60).json()
    assert len(sheet["pieces"]) == len(HOSTILE.encode())
    answer = httpx.post(f"{address}/api/answer", json={"ids": IDS, "switches": [[4, 3, None]]}, timeout=60)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    assert answer.json()["after"]["next"] == json.loads(
        json.dumps(live.answer(IDS, [(4, 3, None)], [])["after"]["next"])
    )


def test_the_page_is_served_under_its_policy(address):
    page = httpx.get(address)
    assert "script-src 'sha256-" in page.headers["content-security-policy"]
    assert '"live":{' in page.text


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("answer", {"ids": []}, "ids: at least one is needed"),
        ("answer", {}, "ids: at least one is needed"),
        ("answer", {"ids": IDS * 5}, "have room in the context"),
        ("answer", {"ids": [999]}, "ids: they go from 0 to 256"),
        ("answer", {"ids": [-1]}, "ids"),
        ("answer", {"idz": IDS}, "did you mean 'ids'?"),
        ("answer", {"ids": IDS, "switches": [[99, 0, None]]}, "layer: 99 was asked for"),
        ("answer", {"ids": IDS, "switches": [[0, 10**6, 1]]}, "token: 1000000 was asked for"),
        ("answer", {"ids": IDS, "switches": [[0, 0, "much"]]}, "switches"),
        ("answer", {"ids": IDS, "switches": [[0, 0, 1e9]]}, "switches"),
        ("answer", {"ids": IDS, "sets": ["step:7"]}, "did you mean 'step:1'?"),
        ("answer", [1], "a JSON object is expected"),
        ("token", {"ids": IDS, "layer": 0}, "token"),
        ("sheet", {"text": "\ud800"}, "valid string"),
        ("sheet", {"text": "x" * 2001}, "text"),
        ("sheet", {"text": ""}, "text"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(address, path, body, said):
    content = json.dumps(body)
    answer = httpx.post(
        f"{address}/api/{path}", content=content, headers={"content-type": "application/json"}, timeout=60
    )
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert said in message
    assert "\n" not in message


def test_other_origins_are_kept_out(address):
    body = json.dumps({"ids": IDS})
    json_type = {"content-type": "application/json"}
    assert httpx.post(f"{address}/api/answer", content=body, headers={"content-type": "text/plain"}).status_code == 415
    assert (
        httpx.post(f"{address}/api/answer", content=body, headers={**json_type, "host": "evil.org"}).status_code == 403
    )
    assert httpx.get(address, headers={"host": "evil.org"}).status_code == 403
    assert httpx.get(f"{address}/api/answer").status_code == 405
    assert httpx.get(f"{address}/other").status_code == 404
