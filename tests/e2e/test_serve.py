"""The server as its users meet it: a process, HTTP, and the `openai` client."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest

from dspark_jax.tokenizer import Tokenizer
from tests.e2e.process import ServerProcess
from tests.models import TinyPair, write_draft, write_target

CAPACITY = 2048  # enough that a request for all of it is not over before it is cancelled
SLOTS = 2
MAX_WAITING = 8
QUESTIONS = [f"What about number {i}?" for i in range(8)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> TinyPair:
    folder = tmp_path_factory.mktemp("models")
    target = write_target(folder / "tiny", layers=2, max_position_embeddings=CAPACITY)
    return TinyPair(target=target, draft=write_draft(folder / "draft", target, block_size=3))


@pytest.fixture(scope="module")
def starting(pair) -> Iterator[tuple[ServerProcess, httpx.Response]]:
    """The server, and its answer to a request that came before it was ready."""
    with ServerProcess(
        "--model", str(pair.target), "--draft", str(pair.draft), "--slots", str(SLOTS),
        "--max-model-len", str(CAPACITY), "--max-waiting", str(MAX_WAITING),
    ) as server:  # fmt: skip
        early = server.http.post("/v1/chat/completions", json=chat_body("Hello?"))
        yield server, early


@pytest.fixture(scope="module")
def server(starting) -> ServerProcess:
    starting[0].wait_ready()
    return starting[0]


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat_body(text: str, **fields: object) -> dict:
    return {"messages": [{"role": "user", "content": text}], **fields}


def ask(client: openai.OpenAI, text: str, **fields: object) -> openai.types.chat.ChatCompletion:
    settings = {"max_tokens": 24, "temperature": 0, **fields}
    return client.chat.completions.create(model="tiny", **chat_body(text), **settings)


def complete(client: openai.OpenAI, prompt: object, **fields: object) -> openai.types.Completion:
    settings = {"max_tokens": 40, "temperature": 0, **fields}
    return client.completions.create(model="tiny", prompt=prompt, **settings)


# Starting up. These come first: they look at the server before it was ready.


def test_health_answers_within_a_second_of_the_start(starting, pair):
    server, _ = starting
    assert server.first_health["status"] == "starting"
    seconds = [server.health_s]
    while min(seconds) >= 1.0 and len(seconds) < 3:  # another process may hold the machine
        with ServerProcess("--model", str(pair.target), "--draft", "none") as again:
            seconds.append(again.health_s)
    assert min(seconds) < 1.0


def test_a_request_that_comes_too_early_is_told_to_wait(starting):
    _, early = starting
    assert early.status_code == 503
    assert int(early.headers["Retry-After"]) > 0
    assert early.json()["error"]["code"] == "not_ready"


def test_health_and_log_say_ready(server):
    assert server.http.get("/health").json() == {"status": "ready", "detail": "warm"}
    assert "compiling 1/" in server.text()
    assert f"ready: tiny on {server.url}" in server.text()
    assert f"curl {server.url}/v1/chat/completions" in server.text()


# Answers.


def test_models(server, client):
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.max_model_len == CAPACITY
    assert client.models.retrieve("tiny").id == "tiny"


def test_chat_counts_its_tokens(client, pair):
    answer = ask(client, "Hello there")
    tokenizer = Tokenizer(pair.target)
    prompt = tokenizer.encode_chat(chat_body("Hello there")["messages"])
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == len(prompt) + 24


def test_streamed_chat_is_the_same_text_in_pieces(client):
    whole = ask(client, "Hello there")
    chunks = list(
        ask(client, "Hello there", stream=True, stream_options={"include_usage": True})
    )
    *pieces, last = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert sum(bool(piece.choices[0].delta.content) for piece in pieces) > 3
    reasons = [piece.choices[0].finish_reason for piece in pieces]
    assert reasons == [None] * (len(pieces) - 1) + ["length"]
    assert last.choices == [] and last.usage == whole.usage


def test_a_stream_without_usage_has_none(client):
    chunks = list(ask(client, "Hello there", stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_the_stream_ends_with_done(server):
    body = chat_body("Hello", max_tokens=3, stream=True)
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: ")) for event in events[:-2])


def test_chat_fills_the_capacity_and_completions_give_sixteen_tokens(server, client):
    answer = ask(client, "Go on", max_tokens=openai.omit, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == CAPACITY
    assert complete(client, "Go on", max_tokens=openai.omit).usage.completion_tokens == 16


def test_either_name_of_the_limit(client):
    assert ask(client, "Hi", max_tokens=5).usage.completion_tokens == 5
    answer = ask(client, "Hi", max_tokens=openai.omit, max_completion_tokens=6)
    assert answer.usage.completion_tokens == 6


def test_a_seed_repeats_and_no_seed_does_not(client):
    def text(**fields: object) -> str:
        return ask(client, "Hi", temperature=1, **fields).choices[0].message.content

    assert len({text(seed=2**63) for _ in range(3)}) == 1
    assert len({text() for _ in range(3)}) > 1


def test_a_filter_that_leaves_one_token_is_greedy(client):
    greedy = complete(client, "the dog").choices[0].text
    for fields in ({"top_k": 1}, {"min_p": 1.0}):
        sampled = complete(client, "the dog", temperature=1.5, seed=1, extra_body=fields)
        assert sampled.choices[0].text == greedy
    sampled = complete(client, "the dog", temperature=1.5, seed=1, top_p=1e-6)
    assert sampled.choices[0].text == greedy


def test_prompts_as_text_ids_and_lists(client, pair):
    ids = Tokenizer(pair.target).encode("the dog")
    alone = [complete(client, p).choices[0].text for p in ("the dog", "two three")]
    assert complete(client, ids).choices[0].text == alone[0]
    both = complete(client, ["the dog", "two three"])
    assert [choice.text for choice in both.choices] == alone
    assert both.usage.completion_tokens == 80
    streamed = ["", ""]
    for chunk in complete(client, ["the dog", "two three"], stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == alone


def test_stop_strings_across_token_boundaries(client):
    pieces = [c.choices[0].text for c in complete(client, "the dog", stream=True)]
    text = "".join(pieces)
    tried = 0
    for i in range(1, len(pieces)):
        before, after = "".join(pieces[:i]), "".join(pieces[i:])
        stop = before[-1:] + after[:1]  # a round's text ends between the two
        if len(stop) < 2:
            continue
        tried += 1
        expected = text[: text.find(stop)]
        answer = complete(client, "the dog", stop=[stop, "never this"])
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
        chunks = list(complete(client, "the dog", stop=stop, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens <= 40
    assert tried >= 5


def test_harmless_parameters_are_accepted(client):
    harmless = {
        "user": "me", "metadata": {"a": "b"}, "store": True, "n": 1, "presence_penalty": 0.0,
        "logprobs": False, "response_format": {"type": "text"}, "tools": [], "logit_bias": {},
        "frequency_penalty": None, "tool_choice": "none",
    }  # fmt: skip
    plain = ask(client, "Hi").choices[0].message.content
    assert ask(client, "Hi", extra_body=harmless).choices[0].message.content == plain


def test_content_in_parts_and_the_developer_role(client):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}]
    plain = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    texts = [
        client.chat.completions.create(model="tiny", messages=m, max_tokens=9, temperature=0)
        for m in (messages, plain)
    ]
    assert texts[0].choices[0].message.content == texts[1].choices[0].message.content
    assert texts[0].usage == texts[1].usage


# Many at once.


def test_eight_at_once_are_what_they_are_alone(server, client):
    alone = [ask(client, q).choices[0].message.content for q in QUESTIONS]
    assert len(set(alone)) > 4  # they do differ

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as many:

            async def one(i: int) -> str:
                body = chat_body(QUESTIONS[i], max_tokens=24, temperature=0)
                if i % 2:
                    return (
                        (await many.chat.completions.create(model="tiny", **body))
                        .choices[0].message.content
                    )  # fmt: skip
                stream = await many.chat.completions.create(model="tiny", stream=True, **body)
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            return await asyncio.gather(*(one(i) for i in range(8)))

    assert asyncio.run(together()) == alone
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:num_requests_waiting") == 0


def test_one_cancelled_midway_frees_its_slot(server, client):
    expected = ask(client, QUESTIONS[0]).choices[0].message.content
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    endless = ask(
        client, "Go on", stream=True, max_tokens=openai.omit, extra_body={"ignore_eos": True}
    )
    others: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: others.append(ask(client, QUESTIONS[0]).choices[0].message.content)
        )
        for _ in range(3)
    ]
    for i, _ in enumerate(endless):
        if i == 0:
            for thread in threads:
                thread.start()
        if i == 5:
            endless.close()
            break
    for thread in threads:
        thread.join()
    assert others == [expected] * 3
    server.wait_metric(aborted + 1, "vllm:request_success_total", finished_reason="abort")
    assert server.metric("vllm:num_requests_running") == 0


def test_a_client_that_hangs_up_without_streaming_frees_its_slot(server):
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    body = json.dumps(chat_body("Go on", ignore_eos=True)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(head.encode() + body[:9])  # not even the whole request
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(head.encode() + body)
        server.wait_metric(1, "vllm:num_requests_running")
    server.wait_metric(aborted + 1, "vllm:request_success_total", finished_reason="abort")
    assert server.metric("vllm:num_requests_running") == 0


def test_a_full_queue_is_429(server):
    endless = chat_body("Go on", ignore_eos=True, stream=True)
    streams = [
        server.http.stream("POST", "/v1/chat/completions", json=endless)
        for _ in range(SLOTS + MAX_WAITING)
    ]
    try:
        for stream in streams:
            assert stream.__enter__().status_code == 200
        refused = server.http.post("/v1/chat/completions", json=chat_body("Me too"))
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["Retry-After"]) > 0
    finally:
        for stream in streams:
            stream.__exit__(None, None, None)
    server.wait_metric(0, "vllm:num_requests_running")
    server.wait_metric(0, "vllm:num_requests_waiting")
    assert server.http.post("/v1/chat/completions", json=chat_body("Hi", max_tokens=1)).is_success


def test_metrics(server, client):
    names = [f"vllm:spec_decode_num_{x}_total" for x in ("drafts", "draft_tokens")]
    names += [f"vllm:{x}_tokens_total" for x in ("prompt", "generation")]
    before = {name: server.metric(name) for name in names}
    usage = ask(client, "Count me", max_tokens=12).usage
    gained = {name: server.metric(name) - before[name] for name in names}
    assert gained["vllm:prompt_tokens_total"] == usage.prompt_tokens
    assert gained["vllm:generation_tokens_total"] == 12
    drafts = gained["vllm:spec_decode_num_drafts_total"]
    assert 12 / 4 <= drafts <= 12  # one to four tokens a round
    assert drafts <= gained["vllm:spec_decode_num_draft_tokens_total"] + 1 <= 3 * drafts + 1
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    by_position = [
        server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(k))
        for k in range(3)
    ]
    assert sum(by_position) == accepted
    scheduled, computed, wasted = (
        server.metric(f"vllm:spec_decode_{x}_rows_total")
        for x in ("scheduled", "verified", "wasted")
    )
    assert 0 < scheduled <= computed and 0 <= wasted < computed
    assert server.metric("vllm:spec_decode_num_bypassed_total") == 0
    error = server.metric("vllm:spec_decode_survival_error_per_pos_total", position="0")
    sent = server.metric("vllm:spec_decode_num_draft_tokens_per_pos_total", position="0")
    assert 0 < error < sent
    assert 0 < server.metric("vllm:spec_decode_survival_per_pos_total", position="0") < sent
    finished = server.metric("vllm:request_success_total", finished_reason="length")
    assert finished >= 1
    assert server.metric("vllm:time_to_first_token_seconds_count") >= finished
    assert server.metric("vllm:e2e_request_latency_seconds_count") >= finished
    assert server.metric("vllm:num_requests_running", model_name="tiny") == 0


# Bad requests.

WRONG_ANYWHERE = [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 1.5),
    ("max_tokens", CAPACITY), ("temperature", -0.1), ("temperature", "hot"), ("temperature", 1e9),
    ("top_p", 0), ("top_p", 1.1), ("top_p", []), ("top_k", -2), ("top_k", 0.5), ("min_p", -0.1),
    ("min_p", 1.5), ("seed", -1), ("seed", 2**64), ("seed", "x"), ("stop", ""), ("stop", [""]),
    ("stop", 3), ("stop", ["x"] * 17), ("stop", ["x", 1]), ("stream", "yes"),
    ("stream_options", {"include_usage": True}), ("ignore_eos", "no"), ("model", 3), ("n", 2),
    ("n", True), ("best_of", 3), ("logit_bias", {"5": 1}), ("presence_penalty", 0.5),
    ("frequency_penalty", -1), ("repetition_penalty", 1.1), ("min_tokens", 4), ("not_a_field", 1),
    ("stop_token_ids", [3]), ("user_name", "x"),
]  # fmt: skip
WRONG_CHAT = [
    ("messages", []), ("messages", None), ("messages", "hi"), ("messages", [{"content": "x"}]),
    ("messages", [{"role": "user", "content": 3}]), ("messages", [{"role": 1, "content": "x"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    ("messages", [{"role": "clown", "content": "x"}]), ("max_completion_tokens", 0),
    ("max_completion_tokens", CAPACITY), ("logprobs", True), ("top_logprobs", 2),
    ("tools", [{"type": "function"}]), ("tool_choice", "required"),
    ("response_format", {"type": "json_object"}), ("modalities", ["audio"]),
    ("reasoning_effort", "high"), ("functions", [{"name": "f"}]), ("prompt", "x"),
]  # fmt: skip
WRONG_COMPLETION = [
    ("prompt", None), ("prompt", ""), ("prompt", []), ("prompt", 5), ("prompt", [""]),
    ("prompt", [5, "x"]), ("prompt", [[5], "x"]), ("prompt", [320]), ("prompt", [-1]),
    ("prompt", [[]]), ("prompt", ["x"] * (SLOTS + MAX_WAITING + 1)), ("echo", True),
    ("logprobs", 0), ("logprobs", 3), ("suffix", "end"), ("messages", []),
]  # fmt: skip
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WRONG = [(path, *case) for path in (CHAT, COMPLETIONS) for case in WRONG_ANYWHERE]
WRONG += [(CHAT, *case) for case in WRONG_CHAT] + [(COMPLETIONS, *c) for c in WRONG_COMPLETION]


@pytest.mark.parametrize(("path", "field", "value"), WRONG)
def test_a_bad_parameter_is_400_and_named(server, path, field, value):
    good = chat_body("Hi") if path == CHAT else {"prompt": "Hi"}
    response = server.http.post(path, json={**good, field: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert field in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"[" * 100_000, b"\xff\xfe", b"nan"])
def test_a_body_that_is_no_json_object_is_400(server, body):
    response = server.http.post(CHAT, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_numbers_that_json_does_not_have_are_refused(server):
    body = b'{"prompt": "x", "temperature": NaN}'
    response = server.http.post(COMPLETIONS, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


def test_contradicting_limits_are_refused(server):
    body = chat_body("Hi", max_tokens=3, max_completion_tokens=4)
    error = server.http.post(CHAT, json=body).json()["error"]
    assert error["param"] == "max_tokens"


def test_a_prompt_beyond_the_limit_is_400_with_numbers(client):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, [7] * 3000, max_tokens=16)
    error = caught.value
    assert error.param == "prompt" and error.code == "context_length_exceeded"
    assert "3000" in str(error) and "16" in str(error) and str(CAPACITY) in str(error)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "word " * 3000, max_tokens=openai.omit)
    assert caught.value.param == "messages" and str(CAPACITY) in str(caught.value)


def test_the_longest_prompt_that_fits_is_served(client):
    answer = complete(client, [7] * (CAPACITY - 1), max_tokens=openai.omit)
    assert answer.usage.total_tokens == CAPACITY


def test_an_unknown_model_or_path_is_404(server, client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="x")
    assert caught.value.param == "model" and caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", CHAT, 405)):
        response = server.http.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_nothing_of_this_left_a_trace(server):
    assert "Traceback" not in server.text()
    assert server.log[-1].startswith("  curl http"), server.text()  # the last thing it said
