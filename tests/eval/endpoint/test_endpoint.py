"""The endpoint as the openai client sees it, over a real socket."""

import base64
import contextlib
import dataclasses
import io
import json
import socket
import threading
import time

import httpx
import jax
import numpy as np
import openai
import pytest
import uvicorn
from PIL import Image

from eval.endpoint.app import Limits, create_app
from eval.endpoint.errors import ApiError
from eval.endpoint.replies import ChatChoice
from eval.endpoint.requests import ChatRequest
from eval.endpoint.service import Service
from tests.v41flash.nn import samples
from tests.v41flash.serving.served import CONFIG, Served
from v41flash.image_files import from_data_url, to_patches
from v41flash.image_rows import RowImage, assemble
from v41flash.nn.vision import ImageBatch
from v41flash.serving import Generator, Options
from v41flash.serving.engine import Engine, Progress
from v41flash.serving.prefill import prefill
from v41flash.serving.state import State
from v41flash.text.prompt import PromptEncoder, forced_call, render, to_text
from v41flash.text.prompt_reply import parse_reply
from v41flash.text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
CONTEXT, SLOTS, BODY, KEY = 1536, 4, 1 << 16, "a key"
# A chat with tools in bytes is longer than what other tests allow.
ROOMY = samples.three_layers(
    vocab_size=260,
    image_token_id=259,
    engram_compressed_vocab_size=260,
    max_position_embeddings=2048,
    vision=samples.VISION,
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def generator():
    served = Served.create(ROOMY)
    options = Options(batch_size=SLOTS, chunk=8, steps=4, exact=True)
    token_map = np.arange(TOKENIZER.vocab_size)
    generator = Generator(ROOMY, served.params, TOKENIZER, token_map=token_map, options=options)
    generator.programs = served.programs
    return generator


@contextlib.contextmanager
def running(app):
    """The address of a server that runs `app`."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def engine(generator):
    with Engine(generator, context=CONTEXT, waiting=128) as engine:
        yield engine


@pytest.fixture(scope="module")
def address(generator, engine):
    app = create_app(Service(generator, engine, "tiny"), Limits(BODY, KEY))
    with running(app) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(
        base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=300
    ) as client:
        yield client


def alone(generator, prompt, **settings):
    (result,) = generator.generate([prompt], **settings)
    return result


def chat_prompt(messages, said=(), **settings):
    encoder = PromptEncoder(TOKENIZER)
    pieces = (*render(messages, **({"thinking": False} | settings)), *said)
    return encoder.encode(pieces).tokens


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")


def test_completion(client, generator):
    answer = client.completions.create(
        model="tiny", prompt="abc", max_tokens=9, seed=3, temperature=0.8, logprobs=2
    )
    truth = alone(generator, "abc", max_tokens=9, seed=3, temperature=0.8)
    (choice,) = answer.choices
    assert choice.text == truth.text
    assert choice.finish_reason == truth.finish
    np.testing.assert_allclose(choice.logprobs.token_logprobs, truth.logprobs, atol=1e-2)
    assert "".join(choice.logprobs.tokens) == truth.text
    assert all(len(top) in (1, 2) for top in choice.logprobs.top_logprobs)
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == len(truth.tokens)
    assert answer.usage.total_tokens == 4 + len(truth.tokens)


@pytest.mark.slow
def test_prompts_and_choices(client, generator):
    ids = [int(i) for i in generator.encode("xyz")]
    answer = client.completions.create(
        model="tiny", prompt=[ids, ids[:2]], n=2, max_tokens=5, seed=7
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for number, (prompt, choice) in enumerate(
        zip([ids, ids, ids[:2], ids[:2]], answer.choices, strict=True)
    ):
        assert choice.text == alone(generator, prompt, max_tokens=5, seed=7 + number).text
    assert answer.usage.prompt_tokens == 4 + 2


def test_stop_and_default_length(client, generator):
    whole = client.completions.create(model="tiny", prompt="q", seed=11).choices[0]
    truth = alone(generator, "q", max_tokens=16, seed=11)
    assert whole.text == truth.text
    stop = whole.text[4:6]
    cut = client.completions.create(model="tiny", prompt="q", seed=11, stop=[stop]).choices[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"


def data_url(seed, size=(50, 30)):
    """A picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def look(*urls):
    """A message with pictures."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}


@pytest.mark.slow
def test_images(client, generator):
    """The first token's distribution is that of a prefill with the same images."""
    messages = [look(data_url(1), data_url(2, (20, 80)))]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=1, logprobs=True, top_logprobs=20, seed=0
    )
    entries = answer.choices[0].logprobs.content[0].top_logprobs
    got = {entry.token: entry.logprob for entry in entries}

    vision = ROOMY.vision
    patches = [to_patches(vision, from_data_url(data_url(*x))) for x in ((1,), (2, (20, 80)))]
    prompt = PromptEncoder(TOKENIZER, ROOMY.image_token_id).encode(
        render(messages, thinking=False), [patch.plan.span for patch in patches]
    )
    assert answer.usage.prompt_tokens == len(prompt.tokens)
    row = [RowImage(*both) for both in zip(prompt.image_starts, patches, strict=True)]
    batch = ImageBatch(*assemble(vision, [row], len(prompt.tokens), 2, 16))
    rows = generator.programs.image_rows(generator.weights, prompt.tokens[None], batch)
    state = State.create(ROOMY, generator.weights, 4, np.arange(4)[None])
    keywords = dict(chunk=8, exact=True, images=rows)
    logits, _ = prefill(
        generator.programs, generator.weights, state, [prompt.tokens], **keywords
    )
    truth = np.asarray(
        jax.nn.log_softmax(np.where(generator.allowed, np.asarray(logits[0]), -np.inf))
    )
    spelled = {TOKENIZER.decode([token]): truth[token] for token in range(259)}
    for token, logprob in got.items():
        if "\ufffd" not in token and token:
            np.testing.assert_allclose(logprob, spelled[token], atol=1e-3)
    others = client.chat.completions.create(
        model="tiny", messages=[look(data_url(3), data_url(4, (20, 80)))], max_tokens=1,
        logprobs=True, top_logprobs=20, seed=0,
    )  # fmt: skip
    entries = others.choices[0].logprobs.content[0].top_logprobs
    assert any(abs(got.get(entry.token, 9) - entry.logprob) > 1e-4 for entry in entries)


def test_models_without_eyes(engine):
    served = Served.create(CONFIG)
    blind = Generator(CONFIG, served.params, TOKENIZER, token_map=np.arange(259))
    body = ChatRequest(messages=[look(data_url(0))])
    with pytest.raises(ApiError, match="takes no images"):
        Service(blind, engine, "blind").chat(body)


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


@pytest.mark.parametrize("effort", [None, "low", 33])
def test_chat(client, generator, effort):
    settings = dict(max_tokens=12, seed=2, temperature=1.0)
    extra = {} if effort is None else {"reasoning_effort": effort}
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, extra_body=extra, logprobs=True, top_logprobs=3, **settings
    )
    thinking = effort is not None
    prompt = chat_prompt(MESSAGES, thinking=thinking, **({"effort": effort} if thinking else {}))
    truth = alone(generator, prompt, **settings)
    (choice,) = answer.choices
    reply = parse_reply(truth.text, thinking=thinking)
    assert choice.message.content == reply.answer
    assert getattr(choice.message, "reasoning_content", "") == reply.reasoning
    assert choice.finish_reason == truth.finish
    content = choice.logprobs.content
    np.testing.assert_allclose([entry.logprob for entry in content], truth.logprobs, atol=1e-2)
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert answer.usage.prompt_tokens == len(prompt)


def test_streams(client, generator):
    settings = dict(max_tokens=14, seed=5, temperature=0.9)
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True},
        extra_body={"reasoning_effort": "high"}, n=2, **settings,
    )  # fmt: skip
    texts, finishes, usage = {0: "", 1: ""}, {}, None
    for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += getattr(choice.delta, "reasoning_content", "") or ""
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    prompt, total = chat_prompt(MESSAGES, thinking=True, effort="high"), 0
    for number in range(2):
        truth = alone(generator, prompt, **(settings | {"seed": 5 + number}))
        assert texts[number] == truth.text.replace("</think>", "")
        assert finishes[number] == truth.finish
        total += len(truth.tokens)
    assert usage.completion_tokens == total
    assert usage.prompt_tokens == len(prompt)


CALL = 'string="true">the sky</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'


@pytest.mark.parametrize("said", [True, False], ids=["forced", "free"])
def test_calls_of_tools(said):
    """What an answer with a call becomes, whole and as a stream."""
    forced = to_text(forced_call("look"))
    text = '<｜DSML｜ parameter name="where" ' + CALL
    said, text = (forced, text) if said else ("", "Wait." + forced + text)
    choice = ChatChoice(0, str, thinking=False, logprobs=False, said=said)
    none, grid = np.zeros(0, np.int32), np.zeros((0, 0))
    deltas = []
    for place in range(0, len(text), 7):
        finish = "stop" if place + 7 >= len(text) else None
        news = Progress(text[place : place + 7], none, none, grid, grid, finish)
        deltas += choice.chunks(news)
    whole = choice.whole()
    assert deltas[0]["delta"]["role"] == "assistant"
    assert deltas[-1]["finish_reason"] == whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == (None if said else "Wait.")
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]) == {"where": "the sky"}
    (streamed,) = [d["delta"]["tool_calls"] for d in deltas if "tool_calls" in d["delta"]]
    assert streamed == [{"index": 0, **call}]
    # It goes back with a result.
    messages = [*MESSAGES, whole["message"]]
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "blue"})
    assert chat_prompt(messages, tools=TOOLS).size


@pytest.mark.parametrize(
    "choice", ["auto", "none", "required", {"type": "function", "function": {"name": "look"}}]
)
def test_tool_choices(client, generator, choice):
    settings = dict(max_tokens=5, seed=4, temperature=1.0)
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=choice, **settings
    )
    said = {"auto": (), "none": (), "required": forced_call()}
    said = forced_call("look") if isinstance(choice, dict) else said[choice]
    prompt = chat_prompt(MESSAGES, said, tools=() if choice == "none" else TOOLS)
    truth = alone(generator, prompt, **settings)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(truth.tokens)
    reply = parse_reply(to_text(said) + truth.text, thinking=False)
    assert (answer.choices[0].message.content or "") == reply.answer


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(messages=[]), "at least one message"),
        (dict(messages=[{"role": "king", "content": "x"}]), "message"),
        (dict(max_tokens=0), "max_tokens"),
        (dict(max_tokens=CONTEXT), "exceed the context"),
        (dict(temperature=3), "temperature"),
        (dict(top_p=0), "top_p"),
        (dict(n=100), "n"),
        (dict(presence_penalty=1), "presence_penalty is not supported"),
        (dict(min_p=0.1), "min_p is not supported"),
        (dict(parallel_tool_calls=False), "parallel_tool_calls"),
        (dict(messages=[*MESSAGES, {"role": "assistant", "content": "x"}]), r"messages\[2\]"),
        (dict(response_format={"type": "json_object"}), "response_format"),
        (dict(top_logprobs=2), "needs logprobs"),
        (dict(logprobs=True, top_logprobs=21), "top_logprobs"),
        (dict(reasoning_effort="medium"), "medium"),
        (dict(tool_choice="required"), "tool_choice needs tools"),
        (
            dict(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "hear"}}),
            "hear",
        ),
        (dict(tools=TOOLS, tool_choice="required", reasoning_effort="low"), "reasoning_effort"),
        (dict(messages=[look("http://host/a.png")]), "data:image"),
        (dict(messages=[look("data:image/png;base64,####")]), "broken base64"),
        (dict(messages=[look("data:image/png;base64,AAAA")]), "image 0: not"),
        (dict(messages=[look(*[data_url(0)] * 9)]), "9 images"),
    ],
)
def test_refused(client, fields, message):
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1} | fields
    with pytest.raises(openai.BadRequestError, match=message):
        client.post("/chat/completions", body=body, cast_to=object)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["a"] * 65, "65 answers"),
        ([], "prompt"),
        ([[]], "at least one token"),
        ([-1], "token ids"),
        ([9999], "vocabulary"),
    ],
)
def test_refused_prompts(client, prompt, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(model="tiny", prompt=prompt)


def test_refused_http(address):
    url, key = f"{address}/v1/completions", {"Authorization": f"Bearer {KEY}"}
    cases = [
        (httpx.post(url, json={"prompt": "x"}), 401, "API key"),
        (httpx.post(url, headers={"Authorization": "Bearer no"}, json={}), 401, "API key"),
        (httpx.post(url, headers=key, content=b"{"), 400, "not JSON"),
        (httpx.post(url, headers=key, content=b"[" * 30_000), 400, "not JSON"),
        (httpx.post(url, headers=key, content=b"[]"), 400, "object"),
        (httpx.post(url, headers=key, content=b'{"prompt": "\\ud800"}'), 400, "surrogate"),
        (httpx.post(url, headers=key, content=b'"' + b"x" * BODY + b'"'), 413, "larger than"),
        (httpx.get(url, headers=key), 405, "Method Not Allowed"),
        (httpx.get(f"{address}/v2/completions"), 404, "Not Found"),
        (httpx.post(url, headers=key, json={"prompt": "x", "model": "y"}), 404, "no model"),
    ]
    for response, status, message in cases:
        assert response.status_code == status, response.text
        assert message in response.json()["error"]["message"]
    assert httpx.get(f"{address}/health").json()["status"] == "ok"


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_go_away(address, engine, stream):
    body = json.dumps({"prompt": "x", "max_tokens": 1400, "stream": stream, "temperature": 0.5})
    host, port = address.removeprefix("http://").split(":")
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    before = dataclasses.replace(engine.counts)
    for _ in range(8):
        admitted, ended = engine.counts.admitted, engine.counts.finished + engine.counts.cancelled
        with socket.create_connection((host, int(port))) as client:
            client.sendall(request.encode())
            _until(lambda n=admitted: engine.counts.admitted > n)
        _until(lambda n=ended: engine.counts.finished + engine.counts.cancelled > n)
        # A sampled answer may end by itself before it is known that its client went.
        if engine.counts.cancelled > before.cancelled:
            break
    assert engine.counts.cancelled == before.cancelled + 1


def _until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_many_clients(client, generator):
    """No token lost, mixed or doubled among streams that come all at once."""
    clients = 16
    texts, errors = [""] * clients, []

    def ask(number):
        try:
            stream = client.completions.create(
                model="tiny", prompt="m" * (number % 5), max_tokens=6 + number % 7, seed=number,
                stream=True,
            )  # fmt: skip
            for event in stream:
                texts[number] += event.choices[0].text
        except Exception as error:  # shown below, in the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for number, text in enumerate(texts):
        settings = dict(max_tokens=6 + number % 7, seed=number)
        assert text == alone(generator, "m" * (number % 5), **settings).text
