"""The router of replicas: by what they hold, by what they have to do, and bounded."""

import json
import random

import pytest

from mlx_parallm.cluster.replicas.affinity import AffinityRouter, PromptPrefix
from mlx_parallm.cluster.replicas.prompt_hashes import MAX_HASHES, prompt_digest


def text(*hashes: int) -> PromptPrefix:
    return PromptPrefix(hashes, [512 * (number + 1) for number in range(len(hashes))])


def router_of(*names: str, **settings: int) -> AffinityRouter:
    router = AffinityRouter(**settings)
    for name in names:
        router.add(name)
    return router


def test_a_conversation_goes_where_its_beginning_is() -> None:
    router = router_of("a", "b", "c")
    router.note("b", text(1, 2, 3))
    router.note("c", text(1, 2))
    assert router.choose(text(1, 2, 3, 4)) == "b"
    assert router.choose(text(1, 2, 9)) in ("b", "c")
    assert router.choose(text(2, 3)) in ("a", "b", "c")  # nobody has it from its beginning


def test_equals_take_turns() -> None:
    router = router_of("a", "b", "c")
    assert {router.choose(text(number)) for number in range(3)} == {"a", "b", "c"}


def test_the_least_loaded_gets_what_nobody_has() -> None:
    router = router_of("a", "b")
    router.begin("a")
    assert [router.choose(text(7)) for _ in range(3)] == ["b", "b", "b"]
    router.end("a")
    router.begin("b")
    assert router.choose(text(7)) == "a"


def test_an_overloaded_replica_is_left_alone() -> None:
    router = router_of("a", "b", overload_slack=4, load_cost=0)
    router.note("a", text(*range(100)))
    for _ in range(8):
        assert router.choose(text(*range(100))) == "a"
        router.begin("a")
        if router.load("a") > 4 + 1.25 * router.load("a") / 2:
            break
    for _ in range(20):
        router.begin("a")
    assert router.choose(text(*range(100))) == "b"


def test_a_short_match_does_not_outweigh_a_queue() -> None:
    router = router_of("a", "b", load_cost=256)
    router.note("a", text(1))
    assert router.choose(text(1, 2, 3)) == "a"
    for _ in range(3):
        router.begin("a")
    assert router.choose(text(1, 2, 3)) == "b"


def test_an_adapter_goes_where_it_is_resident_and_is_forgotten_in_time() -> None:
    router = router_of("a", "b", adapters=2)
    router.note("b", PromptPrefix(), "math")
    assert [router.choose(text(5), "math") for _ in range(3)] == ["b", "b", "b"]
    for other in ("x", "y"):
        router.note("b", PromptPrefix(), other)
    assert {router.choose(text(5), "math") for _ in range(2)} == {"a", "b"}


def test_the_digest_is_bounded_and_keeps_beginnings() -> None:
    router = router_of("a", "b", capacity=4)
    router.note("a", text(1, 2, 3))
    router.note("a", text(4, 5))
    assert router.hashes == 4  # 3, the end of the older text, has gone
    assert router.choose(text(1, 2, 9)) == "a"
    router.clear("a")
    assert router.hashes == 0


def test_who_has_gone_is_not_chosen() -> None:
    router = router_of("a", "b")
    router.note("a", text(1, 2))
    router.begin("a")
    router.remove("a")
    router.end("a")  # the request that it had
    assert router.choose(text(1, 2)) == "b"
    assert router.choose(text(1, 2), avoid=["b"]) is None
    router.add("a")
    assert router.load("a") == 0
    assert router.choose(text(1, 2), avoid=["b"]) == "a"


def test_who_has_gone_takes_its_load_along() -> None:
    router = router_of("a", "b", "busy", overload_slack=4, load_cost=0)
    for _ in range(100):
        router.begin("busy")
    router.remove("busy")
    for _ in range(100):
        router.end("busy")  # its requests end after it has gone
    router.note("a", text(*range(100)))
    for _ in range(12):
        router.begin("a")
    assert router.choose(text(*range(100))) == "b", "12 requests are too many, where all others have none"


def test_its_books_balance_whatever_happens() -> None:
    draw = random.Random(0)
    router = AffinityRouter(capacity=50, adapters=2)
    running: list[str] = []
    for number in range(3000):
        names = router.names
        action = draw.random()
        if not names or (action < 0.03 and len(names) < 12):
            router.add(f"r{number}")
        elif action < 0.05:
            gone = draw.choice(names)
            router.remove(gone)
            running = [name for name in running if name != gone]
        elif action < 0.3 and running:
            router.end(running.pop(draw.randrange(len(running))))
        else:
            prefix = text(*(draw.randrange(40) for _ in range(draw.randrange(8))))
            adapter = draw.choice([None, "x", "y", "z"])
            chosen = router.choose(prefix, adapter)
            assert chosen in names
            router.note(chosen, prefix, adapter)
            router.begin(chosen)
            running.append(chosen)
        assert {name: router.load(name) for name in router.names} == {
            name: running.count(name) for name in router.names
        }
    for name in router.names:
        router.remove(name)
    assert router.hashes == 0


def chat(*contents: str, **fields: object) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"model": "default", "messages": messages, **fields}).encode()


def common(one: bytes, two: bytes, *tenants: bytes) -> int:
    """Characters that two prompts have in common by their hashes."""
    first, second = prompt_digest(one, *tenants[:1]).prefix, prompt_digest(two, *tenants[1:]).prefix
    same = [
        length
        for ours, theirs, length in zip(first.hashes, second.hashes, first.lengths, strict=False)
        if ours == theirs
    ]
    return same[-1] if same else 0


def test_turns_of_a_conversation_share_their_beginning() -> None:
    assert common(chat("hello"), chat("hello", "and", "more")) > 0
    assert common(chat("x" * 5000), chat("x" * 4000 + "y" * 1000)) >= 3584
    assert common(chat("hello"), chat("goodbye")) == 0
    one, two = ({"prompt": [7] * 400 + [last] * 200} for last in (1, 2))
    assert common(json.dumps(one).encode(), json.dumps(two).encode()) >= 1024


def test_other_adapters_salts_and_keys_share_nothing() -> None:
    assert common(chat("hello"), chat("hello", lora_adapter="math")) == 0
    assert common(chat("hello"), chat("hello", cache_salt="x")) == 0
    assert common(chat("hello"), chat("hello"), b"key one", b"key two") == 0
    assert prompt_digest(chat("hello", lora_adapter="math")).adapter == "math"
    assert prompt_digest(chat("hello"), everywhere=["default"]).adapter is None


def test_any_body_has_a_bounded_digest() -> None:
    for body in (b"", b"{", b"[]", b'"x"', b'{"prompt": 7}', b'{"prompt": [[]]}', b'{"messages": [1, null]}'):
        assert len(prompt_digest(body).prefix.hashes) <= 4
    long = prompt_digest(chat(*("word " * 1000 for _ in range(1000)))).prefix
    assert len(long.hashes) == len(long.lengths) == MAX_HASHES
    assert list(long.lengths) == sorted(long.lengths)


def test_a_long_prompt_is_hashed_at_steps_that_grow() -> None:
    lengths = list(prompt_digest(json.dumps({"prompt": "x" * 200_000}).encode()).prefix.lengths)
    short, middle = [*range(512, 16_385, 512)], [*range(16_384 + 2_048, 131_073, 2_048)]
    assert lengths == [*short, *middle, *range(131_072 + 8_192, 200_000, 8_192), 200_000]


@pytest.mark.parametrize(
    ("field", "one", "other"),
    [
        ("instructions", "be short", "be long"),
        ("system", "be short", "be long"),
        ("prompt", "a b", "a c"),
        ("text", "a b", "a c"),
        ("input", "a b", "a c"),
        ("input_ids", [1, 2], [1, 3]),
        ("messages", [{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]),
    ],
)
def test_a_prompt_has_a_digest_by_whatever_name_it_comes(field: str, one: object, other: object) -> None:
    first, again, second = (prompt_digest(json.dumps({field: given}).encode()).prefix for given in (one, one, other))
    assert list(first.hashes) == list(again.hashes) != list(second.hashes)
    assert len(first.hashes) == 1
