"""A server of a tiny model that reads images: OpenAI's client, answers beside mlx-vlm's, images that are refused."""

import base64
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip("mlx_vlm")

from PIL import Image

from tests.support.servers import ServerProcess, ours, running
from tests.tiny_vision import picture, tiny_vision
from tests.unit.test_media import Site, bomb, to

WIDE, TALL = picture(60, 40), picture(30, 70, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision("smolvlm", tmp_path_factory.mktemp("vision") / "smolvlm")


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def server(folder: Path, site: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    media = tmp_path_factory.mktemp("media")
    WIDE.save(media / "wide.png")
    flags = ["--allowed-media-host", site.removeprefix("http://"), "--allowed-local-media-path", str(media)]
    with running(ours(f"eye={folder}", flags)) as process:
        process.media = media  # type: ignore[attr-defined]
        yield process


def data_url(image: Image.Image, kind: str = "png") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def part(value: str | Image.Image) -> dict[str, Any]:
    if isinstance(value, Image.Image):
        return {"type": "image_url", "image_url": {"url": data_url(value)}}
    if "://" in value or value.startswith("data:"):
        return {"type": "image_url", "image_url": {"url": value}}
    return {"type": "text", "text": value}


def ask(server: ServerProcess, *parts: str | Image.Image, **more: Any) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": [part(value) for value in parts]}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=body | more, timeout=60)


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def test_openais_image_example_works(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    completion = client.chat.completions.create(
        model="eye",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is in this image?"},
                    {"type": "image_url", "image_url": {"url": data_url(WIDE, "jpeg"), "detail": "high"}},
                ],
            }
        ],
        max_tokens=5,
    )
    assert completion.choices[0].message.content is not None
    assert completion.usage is not None
    assert completion.usage.prompt_tokens > 40, "the image is part of the prompt"
    entry = next(model for model in client.models.list() if model.id == "eye")
    assert entry.model_extra is not None
    assert entry.model_extra["kind"] == "vision"


def test_answers_equal_mlx_vlms_own(server: ServerProcess, folder: Path) -> None:
    from mlx_vlm import load, stream_generate

    model, processor = load(str(folder))
    processor.tokenizer.stopping_criteria.eos_token_ids = []

    def expected(*parts: str | Image.Image) -> list[int]:
        content = [{"type": "text", "text": value} if isinstance(value, str) else {"type": "image"} for value in parts]
        messages = [{"role": "user", "content": content}]
        text = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        images = [value for value in parts if not isinstance(value, str)] or None
        found = stream_generate(model, processor, text, image=images, max_tokens=8, temperature=0.0)
        return [response.token for response in found][:8]

    asked: list[tuple[str | Image.Image, ...]] = [
        ("what is it?", WIDE),
        (WIDE, TALL, "and these?"),
        ("no image",),
        (TALL, "what is it?"),
    ]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda parts: tokens(ask(server, *parts)), asked))
    assert answers == [expected(*parts) for parts in asked]
    again = ask(server, *asked[1])
    assert tokens(again) == answers[1]
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 32


def base64_of(image: Image.Image) -> str:
    return data_url(image).partition(",")[2]


def test_anthropics_image_blocks(server: ServerProcess, site: str) -> None:
    def said(*blocks: dict[str, Any]) -> str:
        body = {
            "model": "eye",
            "max_tokens": 8,
            "temperature": 0,
            "messages": [{"role": "user", "content": list(blocks)}],
        }
        answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        counted = httpx.post(f"{server.url}/v1/messages/count_tokens", json=body, timeout=60).json()["input_tokens"]
        usage = answer.json()["usage"]
        assert counted == sum(usage[key] for key in usage if key.endswith("input_tokens"))
        assert counted > 40, "the image is part of the prompt"
        return "".join(block["text"] for block in answer.json()["content"])

    data = {"type": "base64", "media_type": "image/png", "data": base64_of(WIDE)}
    whole = ask(server, "look", WIDE, ignore_eos=False).json()["choices"][0]["message"]["content"]
    assert said({"type": "text", "text": "look"}, {"type": "image", "source": data}) == whole
    said({"type": "image", "source": {"type": "url", "url": f"{site}/png"}})
    wrong = {"type": "image", "source": data | {"data": "aGVsbG8="}}
    body = {"model": "eye", "max_tokens": 8, "messages": [{"role": "user", "content": [wrong]}]}
    refused = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert refused.json()["error"]["message"].startswith("messages.0.content.0.source: ")


def test_ollamas_images(server: ServerProcess) -> None:
    options = {"temperature": 0, "num_predict": 8}
    whole = ask(server, WIDE, "look", ignore_eos=False).json()["choices"][0]["message"]["content"]
    message = {"role": "user", "content": "look", "images": [base64_of(WIDE)]}
    body = {"model": "eye", "messages": [message], "stream": False, "options": options}
    answer = httpx.post(f"{server.url}/api/chat", json=body, timeout=60).json()
    assert answer["message"]["content"] == whole
    prompt = {"model": "eye", "prompt": "look", "images": [base64_of(WIDE)], "stream": False, "options": options}
    assert httpx.post(f"{server.url}/api/generate", json=prompt, timeout=60).json()["response"] == whole
    shown = httpx.post(f"{server.url}/api/show", json={"model": "eye"}).json()
    assert "vision" in shown["capabilities"]
    refused = httpx.post(f"{server.url}/api/generate", json=prompt | {"images": ["%%"]}, timeout=60)
    assert (refused.status_code, refused.json()["error"].startswith("images.0: ")) == (400, True)


def test_urls_of_a_site_and_of_a_file(server: ServerProcess, site: str) -> None:
    assert tokens(ask(server, "look", f"{site}/png"))
    assert tokens(ask(server, "look", f"{site}/{to('/png')}"))
    local = ask(server, "look", f"file://{server.media}/wide.png")  # type: ignore[attr-defined]
    assert tokens(local) == tokens(ask(server, "look", WIDE))


def test_a_plain_string_is_rendered_too(server: ServerProcess) -> None:
    """The template takes parts alone: the text of a string would be lost."""
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
    answers = [
        httpx.post(f"{server.url}/v1/chat/completions", json=body | {"messages": [message]}, timeout=60).json()
        for message in ({"role": "user", "content": "hello"}, {"role": "user", "content": [part("hello")]})
    ]
    assert answers[0]["choices"][0]["message"] == answers[1]["choices"][0]["message"]
    assert answers[0]["usage"]["prompt_tokens"] > 10


def png(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


WRONG = {
    "corrupt": (png(b"\x89PNG\r\n\x1a\n" + b"\0" * 100), "damaged"),
    "giant": (png(bomb(30000, 30000)), "pixels"),
    "bomb": (png(bomb(7900, 7900)), "pixels"),
    "svg": (png(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "SVG"),
    "svg type": ("data:image/svg+xml;base64,PHN2Zy8+", "SVG"),
    "truncated": (data_url(WIDE)[:-3], "base64"),
    "half": (png(base64.b64decode(data_url(WIDE).partition(",")[2])[:500]), "damaged"),
    "text": ("data:text/plain;base64,aGVsbG8=", "text/plain"),
    "empty": ("data:image/png;base64,", "empty"),
    "loopback": ("http://127.0.0.1:1/x.png", "no public address"),
    "metadata": ("http://169.254.169.254/latest/meta-data/", "no public address"),
    "mapped": ("http://[::ffff:10.0.0.1]/x.png", "no public address"),
    "scheme": ("ftp://example.com/x.png", "http or https"),
    "passwd": ("file:///etc/passwd", "no such file"),
}


def test_images_that_are_refused_harm_nobody(server: ServerProcess, site: str) -> None:
    wrong = dict(WRONG)
    wrong["redirect"] = (f"{site}/{to('http://10.0.0.1/x.png')}", "no public address")
    wrong["round"] = (f"{site}/round/0", "redirects")
    wrong["html"] = (f"{site}/html", "no known format")
    wrong["missing"] = (f"{site}/status/404", "404")
    expected = tokens(ask(server, "beside", WIDE, max_tokens=24))
    with ThreadPoolExecutor(8) as pool:
        beside = [pool.submit(ask, server, "beside", WIDE, max_tokens=24) for _ in range(3)]
        answers = dict(zip(wrong, pool.map(lambda one: ask(server, "look", one[0]), wrong.values()), strict=True))
        assert [tokens(one.result()) for one in beside] == [expected] * 3
    for name, answer in answers.items():
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_image"), (name, error)
        assert wrong[name][1] in error["message"], (name, error)
        assert error["param"] == "messages.0.content.1"


def test_other_things_that_are_wrong(server: ServerProcess) -> None:
    def error(**body: Any) -> dict[str, Any]:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={"max_tokens": 2} | body, timeout=60)
        assert answer.status_code == 400, answer.text
        found: dict[str, Any] = answer.json()["error"]
        return found

    def message(*content: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": list(content)}]

    image = part(WIDE)
    assert "needs an image_url" in error(messages=message({"type": "image_url"}))["message"]
    assert error(messages=message({"type": "image_url", "image_url": {}}))["param"].startswith("messages.0.content.0")
    assert error(messages=message({"type": "image_url", "image_url": {"url": 5}}))
    assert error(messages=message({"type": "video_url", "video_url": {"url": "x"}}))
    assert "at most 32" in error(messages=message(*[image] * 33))["message"]
    assert "own mark of an image" in error(messages=message(part("a <image> b"), image))["message"]
    assert error(messages=message(image), truncate_prompt_tokens=5)["param"] == "truncate_prompt_tokens"
    assert error(messages=message(*[image] * 32), max_tokens=4000)["code"] == "context_length_exceeded"
    assert "not supported here" in httpx.post(f"{server.url}/tokenize", json={"messages": message(image)}).text


def test_a_model_without_vision_says_so(tiny_server: ServerProcess) -> None:
    answer = ask(tiny_server, "look", WIDE)
    assert answer.status_code == 400
    assert "reads text only" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages.0.content.1"
