"""/v1/completions on a real server: every parameter, whole and streamed."""

import json
import math
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.http import Api, choices, finish_of, text_of
from tests.support.servers import ServerProcess

PROMPT = "the and of a thing in the end"


@pytest.fixture(scope="module")
def api(tiny_server: ServerProcess) -> Iterator[Api]:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        yield Api(client)


def text(api: Api, **body: object) -> str:
    answer = api.complete(**{"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, **body})
    return str(answer["choices"][0]["text"])


def test_answer_and_usage(api: Api) -> None:
    answer = api.complete(prompt=PROMPT, max_tokens=5, ignore_eos=True, model="default")
    choice, usage = answer["choices"][0], answer["usage"]
    assert choice["finish_reason"] == "length"
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert answer["model"] == "tiny-llama"
    assert answer["id"].startswith("cmpl-")


def test_sixteen_tokens_unless_told(api: Api) -> None:
    assert api.complete(prompt=PROMPT, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_stream_says_the_same(api: Api) -> None:
    whole = text(api)
    chunks = api.stream_completion(prompt=PROMPT, max_tokens=12, ignore_eos=True)
    assert text_of(chunks) == whole
    assert finish_of(chunks) == "length"
    assert len(chunks) > 3
    assert all("usage" not in chunk for chunk in chunks)


def test_stream_usage(api: Api) -> None:
    body = dict(prompt=PROMPT, max_tokens=6, ignore_eos=True)
    chunks = api.stream_completion(**body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    chunks = api.stream_completion(**body, stream_options={"continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_all_kinds_of_prompt(api: Api) -> None:
    ids = api.client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    expected = text(api)
    assert text(api, prompt=ids) == expected
    for prompts in ([PROMPT, "other"], [ids, ids[:3]]):
        answer = api.complete(prompt=prompts, max_tokens=12, ignore_eos=True)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["choices"][0]["text"] == expected
        assert answer["usage"]["completion_tokens"] == 24
    assert api.complete(prompt="", max_tokens=2)["usage"]["prompt_tokens"] == 1


def test_n_choices_of_several_prompts_are_numbered_as_openai_does(api: Api) -> None:
    body = dict(prompt=[PROMPT, "other"], n=2, temperature=1.5, seed=7, max_tokens=8, ignore_eos=True)
    answer = api.complete(**body)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts[0] != texts[1]
    chunks = api.stream_completion(**body)
    assert [text_of(chunks, index) for index in range(4)] == texts
    assert api.complete(**body)["choices"] == answer["choices"]


def test_echo(api: Api) -> None:
    expected = text(api)
    assert text(api, echo=True) == PROMPT + expected
    chunks = api.stream_completion(prompt=PROMPT, max_tokens=12, ignore_eos=True, echo=True)
    assert text_of(chunks) == PROMPT + expected


def test_logprobs(api: Api) -> None:
    body = dict(prompt=PROMPT, max_tokens=6, ignore_eos=True, logprobs=3)
    answer = api.complete(**body)["choices"][0]
    logprobs = answer["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 6
    assert logprobs["text_offset"][0] == 0, "the answer's own beginning, where the prompt is not echoed"
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert 3 <= len(top) <= 4 or "�" in top
        assert math.isclose(top[token], logprob)
        assert logprob == max(top.values())
    chunks = api.stream_completion(**body)
    streamed = [choice["logprobs"] for choice in choices(chunks) if choice["logprobs"]]
    assert [token for part in streamed for token in part["tokens"]] == logprobs["tokens"]
    assert [place for part in streamed for place in part["text_offset"]] == logprobs["text_offset"]


def test_prompt_scoring(api: Api) -> None:
    answer = api.complete(prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    choice, usage = answer["choices"][0], answer["usage"]
    assert choice["text"] == PROMPT
    assert usage["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == usage["prompt_tokens"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in choice["logprobs"]["token_logprobs"][1:])
    for token, place in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
        assert PROMPT[place:].startswith(token)


def test_prompt_logprobs_and_token_ids(api: Api) -> None:
    body = dict(prompt=PROMPT, max_tokens=4, ignore_eos=True, return_token_ids=True)
    choice = api.complete(**body, prompt_logprobs=2)["choices"][0]
    assert len(choice["token_ids"]) == 4
    assert choice["prompt_logprobs"][0] is None
    for token, entry in zip(choice["prompt_token_ids"][1:], choice["prompt_logprobs"][1:], strict=True):
        assert entry[str(token)]["rank"] >= 1
        assert 2 <= len(entry) <= 3
    chunks = api.stream_completion(**body)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]
    streamed = [token for part in choices(chunks) for token in part.get("token_ids") or []]
    assert streamed == choice["token_ids"]


def test_stop_string_across_tokens(api: Api) -> None:
    whole = text(api, max_tokens=40)
    stop = whole[10:14]
    expected = whole[: whole.index(stop)]
    answer = api.complete(prompt=PROMPT, max_tokens=40, ignore_eos=True, stop=[stop, "never to be seen"])
    choice = answer["choices"][0]
    assert choice["text"] == expected
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert text(api, max_tokens=40, stop=stop, include_stop_str_in_output=True) == expected + stop
    chunks = api.stream_completion(prompt=PROMPT, max_tokens=40, ignore_eos=True, stop=stop)
    assert text_of(chunks) == expected
    assert finish_of(chunks) == "stop"


def test_stop_token_ids_and_min_tokens(api: Api) -> None:
    first = api.complete(prompt=PROMPT, max_tokens=8, ignore_eos=True, return_token_ids=True)["choices"][0]["token_ids"]
    answer = api.complete(prompt=PROMPT, max_tokens=8, ignore_eos=True, stop_token_ids=[first[3]])
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", first[3])
    assert answer["usage"]["completion_tokens"] == first.index(first[3]) + 1
    least = api.complete(prompt=PROMPT, max_tokens=8, ignore_eos=True, stop_token_ids=[first[0]], min_tokens=4)
    assert least["usage"]["completion_tokens"] >= 4


def test_sampling_parameters_are_heard(api: Api) -> None:
    greedy = text(api)
    assert text(api, temperature=2.0, top_k=1) == greedy
    assert text(api, temperature=1.0, top_p=1e-9) == greedy
    assert text(api, temperature=1.0, min_p=1.0) == greedy
    assert text(api, temperature=1.5, seed=1) == text(api, temperature=1.5, seed=1)
    assert text(api, temperature=1.5, seed=1) != text(api, temperature=1.5, seed=2)
    ids = api.complete(prompt=PROMPT, max_tokens=1, return_token_ids=True, logit_bias={"40": 100})
    assert ids["choices"][0]["token_ids"] == [40]
    assert text(api, max_tokens=60, frequency_penalty=2.0) != text(api, max_tokens=60)
    assert text(api, max_tokens=60, presence_penalty=2.0) != text(api, max_tokens=60)
    assert text(api, max_tokens=60, repetition_penalty=5.0) != text(api, max_tokens=60)


def test_guided_outputs(api: Api) -> None:
    assert text(api, guided_regex="[a-c]{5}", ignore_eos=False).strip("abc") == ""
    assert text(api, guided_choice=["left", "right"], ignore_eos=False) in ("left", "right")
    assert text(api, structured_outputs={"choice": ["left", "right"]}, ignore_eos=False) in ("left", "right")


def test_structural_tags_hold_within_free_text(api: Api) -> None:
    """The trigger is the model's likeliest token: what follows it must be of the schema."""
    first = text(api, max_tokens=1)
    part = {"begin": first, "schema": {"enum": [12345]}, "end": "!"}
    wanted = {"structures": [part], "triggers": [first]}
    for body in (
        {"structured_outputs": {"structural_tag": wanted}},
        {"structured_outputs": {"structural_tag": json.dumps(wanted)}},
        {"response_format": {"type": "structural_tag", **wanted}},
    ):
        assert text(api, max_tokens=12, **body).startswith(f"{first}12345!")


def test_a_schema_as_llama_cpp_has_it(api: Api) -> None:
    shape = {"type": "json_object", "schema": {"enum": [12345]}}
    assert text(api, response_format=shape, max_tokens=30, ignore_eos=False) == "12345"


def test_tokens_as_ids(api: Api) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "logprobs": 2, "return_token_ids": True, "ignore_eos": True}
    choice = api.complete(**body, return_tokens_as_token_ids=True)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
    assert choice["prompt_logprobs"] is None


def test_truncated_prompt_and_long_prompt(api: Api) -> None:
    answer = api.complete(prompt=PROMPT * 400, max_tokens=1, truncate_prompt_tokens=7)
    assert answer["usage"]["prompt_tokens"] == 7
    long = "hello " * 1000
    assert api.complete(prompt=long, max_tokens=1, truncate_prompt_tokens=2000)["usage"]["prompt_tokens"] == 2000
