"""Parts of `/v1/responses` without a server: items to messages, text to items, and the store."""

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pydantic import TypeAdapter, ValidationError

from mlx_parallm.errors import InvalidRequestError, NotFoundError, UnavailableError
from mlx_parallm.server.api.responses.bodies import ResponseBody
from mlx_parallm.server.api.responses.input_items import PlacedItem, PromptMessage, prompt_messages, shortened
from mlx_parallm.server.api.responses.items import InputItem, stored_items
from mlx_parallm.server.api.responses.output import OutputBuilder
from mlx_parallm.server.api.responses.response_store import FILE_NAME, ResponseStore, StoredResponse
from mlx_parallm.text.parsers.calls import CallDelta, Piece

T = TypeVar("T")
ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


def messages(items: list[Any], instructions: str | None = None) -> list[dict[str, Any]]:
    placed = [PlacedItem(item, f"input.{number}") for number, item in enumerate(ITEMS.validate_python(items))]
    return [entry.message for entry in prompt_messages(placed, instructions)]


def call(identity: str, name: str = "f") -> dict[str, Any]:
    return {"type": "function_call", "call_id": identity, "name": name, "arguments": '{"x": 1}'}


def output(identity: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": identity, "output": f"of {identity}"}


# Items to messages


def test_instructions_and_what_comes_first_are_one_system_message() -> None:
    items = [
        {"role": "developer", "content": "b"},
        {"role": "system", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert messages(items, "a") == [{"role": "system", "content": "a\n\nb\n\nc"}, {"role": "user", "content": "d"}]
    assert messages(items[2:]) == [{"role": "user", "content": "d"}]


def test_an_answer_is_one_message() -> None:
    items = [
        {"role": "user", "content": "go"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        call("1"),
        call("2", "g"),
        output("2"),
        output("1"),
        {"role": "assistant", "content": "done"},
    ]
    found = messages(items)
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "tool", "assistant"]
    assert found[1]["reasoning_content"] == "hm"
    assert found[1]["content"] == "I look."
    assert [one["function"] for one in found[1]["tool_calls"]] == [
        {"name": "f", "arguments": {"x": 1}},
        {"name": "g", "arguments": {"x": 1}},
    ]
    assert found[2] == {"role": "tool", "tool_call_id": "2", "name": "g", "content": "of 2"}


def test_text_after_a_call_is_another_message() -> None:
    found = messages([call("1"), {"role": "assistant", "content": "wait"}, output("1")])
    assert [message["role"] for message in found] == ["assistant", "assistant", "tool"]


def test_shell_and_custom_calls_are_calls_of_functions() -> None:
    items = [
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "1", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "namespace": "n", "input": "text"},
        {"type": "local_shell_call_output", "call_id": "1", "output": "a"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "b"}]},
    ]
    found = messages(items)
    assert [one["function"] for one in found[0]["tool_calls"]] == [
        {"name": "local_shell", "arguments": {"command": ["ls"]}},
        {"name": "n__patch", "arguments": {"input": "text"}},
    ]
    assert [message["content"] for message in found[1:]] == ["a", "b"]


def test_images_stay_in_their_places() -> None:
    parts = [{"type": "input_image", "image_url": "data:,x", "detail": "low"}, {"type": "input_text", "text": "what?"}]
    [item] = ITEMS.validate_python([{"role": "user", "content": parts}])
    [found] = prompt_messages([PlacedItem(item, "input.0")], None)
    assert found.message == {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}
    assert [(image.url, image.param) for image in found.images] == [("data:,x", "input.0.content.0")]


def test_images_of_a_tool_are_shown_by_the_user() -> None:
    parts = [{"type": "input_text", "text": "a cat"}, {"type": "input_image", "image_url": "http://x/cat.png"}]
    items = ITEMS.validate_python([call("1"), {"type": "function_call_output", "call_id": "1", "output": parts}])
    found = prompt_messages([PlacedItem(item, f"input.{number}") for number, item in enumerate(items)], None)
    assert [entry.role for entry in found] == ["assistant", "tool", "user"]
    assert found[1].message["content"] == "a cat"
    assert [(image.url, image.param) for image in found[2].images] == [("http://x/cat.png", "input.1.output.1")]


@pytest.mark.parametrize("arguments", ["{", "[1]", "null", '{"x": 1'])
def test_calls_that_went_wrong_stay(arguments: str) -> None:
    [message] = messages([call("1") | {"arguments": arguments}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"arguments": arguments}


def test_an_output_needs_its_call() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        messages([output("1")])
    assert caught.value.param == "input.0.call_id"


def test_what_is_left_out_first() -> None:
    roles = ["system", "user", "assistant", "user", "assistant", "tool", "assistant", "tool"]
    talk = [PromptMessage({"role": role, "content": str(number)}) for number, role in enumerate(roles)]
    cuts = ["".join(entry.message["content"] for entry in cut) for cut in shortened(talk)]
    assert cuts == ["034567", "0367"]
    assert len(shortened(talk[:1])) == 0
    assert len(shortened(talk[:2])) == 0


def test_stored_items_have_ids_of_their_own() -> None:
    given = ITEMS.validate_python(
        [
            {"role": "user", "content": "a"},
            {"id": "msg_1", "role": "user", "content": "b"},
            {**call("1"), "id": "msg_1"},
        ]
    )
    stored = stored_items(given)
    assert len({item["id"] for item in stored}) == 3
    assert stored[1]["id"] == "msg_1"
    assert stored[0]["content"] == [{"type": "input_text", "text": "a"}]
    assert ITEMS.validate_python(stored)


# Text to items

TOOLS: list[Any] = [
    {"type": "function", "name": "f"},
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}},
    {"type": "local_shell"},
]


def built(*pieces: Piece, status: str = "completed") -> tuple[list[dict[str, Any]], list[str]]:
    body = ResponseBody.model_validate({"input": "x", "tools": TOOLS})
    kinds: list[str] = []

    def emit(kind: str, **fields: Any) -> None:
        kinds.append(kind.removeprefix("response."))

    builder = OutputBuilder(body.tool_use, emit, encoded_reasoning=False)
    for piece in pieces:
        builder.add(piece)
    builder.finish(status)
    return builder.items, kinds


def test_items_follow_one_another() -> None:
    items, kinds = built(
        Piece(reasoning="hm"),
        Piece(reasoning="m", content="\n"),
        Piece(content="I look."),
        Piece(calls=(CallDelta(0, "c0", "f"), CallDelta(0, arguments='{"x"'))),
        Piece(calls=(CallDelta(0, arguments=": 1}"), CallDelta(1, "c1", "f", "{}"))),
        Piece(content="\n"),
    )
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "hmm"}]
    assert items[1]["content"][0]["text"] == "\nI look."
    assert [item["arguments"] for item in items[2:]] == ['{"x": 1}', "{}"]
    assert {item["status"] for item in items} == {"completed"}
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 4
    assert kinds[-2:] == ["function_call_arguments.done", "output_item.done"]


@pytest.mark.parametrize(
    ("choice", "function"),
    [
        ({"type": "function", "name": "f"}, "f"),
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "local_shell"}, "local_shell"),
        ({"type": "custom", "name": "f"}, None),
        ({"type": "function", "name": "patch"}, None),
    ],
)
def test_a_tool_is_chosen_by_its_type_and_name(choice: dict[str, str], function: str | None) -> None:
    body = {"input": "x", "tools": TOOLS, "tool_choice": choice}
    if function is None:
        with pytest.raises(ValidationError, match="There is no tool"):
            ResponseBody.model_validate(body).tool_use  # noqa: B018
    else:
        use = ResponseBody.model_validate(body).tool_use
        assert use.named is not None
        assert (use.must_call, use.named.function) == (True, function)


def test_other_tools_get_items_of_their_own() -> None:
    items, kinds = built(
        Piece(
            calls=(
                CallDelta(0, "c0", "patch", '{"input": "line\\n"}'),
                CallDelta(1, "c1", "local_shell", '{"command": ["ls", "-l"], "timeout_ms": 5}'),
                CallDelta(2, "c2", "patch", "not json"),
                CallDelta(3, "c3", "local_shell", '{"command": "ls"}'),
                CallDelta(4, "c4", "unknown", "{}"),
            )
        )
    )
    assert [item["type"] for item in items] == [
        *("custom_tool_call", "local_shell_call", "custom_tool_call", "local_shell_call", "function_call")
    ]
    assert (items[0]["input"], items[2]["input"]) == ("line\n", "not json")
    assert items[1]["action"]["command"] == ["ls", "-l"]
    assert items[3]["action"]["command"] == ['{"command": "ls"}']
    assert kinds.count("custom_tool_call_input.done") == 2


def test_calls_of_other_tools_have_their_shape_from_the_beginning() -> None:
    body = ResponseBody.model_validate({"input": "x", "tools": TOOLS})
    begun: list[dict[str, Any]] = []

    def emit(kind: str, **fields: Any) -> None:
        if kind == "response.output_item.added":
            begun.append(dict(fields["item"]))

    builder = OutputBuilder(body.tool_use, emit, encoded_reasoning=False)
    builder.add(Piece(calls=(CallDelta(0, "c0", "patch", "{"), CallDelta(1, "c1", "local_shell", "{"))))
    custom, shell = begun
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "")
    assert (shell["type"], shell["call_id"]) == ("local_shell_call", "c1")
    assert shell["action"] == {"type": "exec", "command": [], "env": {}}


def test_nothing_is_an_empty_message() -> None:
    items, kinds = built()
    assert items[0]["content"][0]["text"] == ""
    assert kinds[0] == "output_item.added"
    assert kinds[-1] == "output_item.done"


def test_what_is_cut_off_is_incomplete() -> None:
    items, _ = built(Piece(reasoning="a", content="b"), status="incomplete")
    assert [item["status"] for item in items] == ["completed", "incomplete"]


def test_a_grammar_is_told() -> None:
    use = ResponseBody.model_validate({"input": "x", "tools": TOOLS}).tool_use
    assert "start: /a+/" in use.tools[1].definition["function"]["description"]
    for syntax, name in (("lark", "Lark grammar"), ("regex", "regular expression")):
        form = {"type": "grammar", "syntax": syntax, "definition": "a"}
        tool = {"type": "custom", "name": "t", "description": "It is.", "format": form}
        use = ResponseBody.model_validate({"input": "x", "tools": [tool]}).tool_use
        description = use.tools[0].definition["function"]["description"]
        assert description == f"It is.\nIts input follows this {name}:\na"


# The store


def response(name: str, previous: str | None = None, text: str = "answer") -> StoredResponse:
    answer = {"id": f"msg_{name}", "type": "message", "role": "assistant", "content": [], "text": text}
    given = {"id": f"in_{name}", "type": "message", "role": "user", "content": [], "text": "question"}
    return StoredResponse(
        {"id": name, "status": "completed", "previous_response_id": previous, "output": [answer]}, [given]
    )


def done(work: Awaitable[T]) -> T:
    async def wait() -> T:
        return await work

    return asyncio.run(wait())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def ids(items: list[dict[str, Any]]) -> list[str]:
    return [item["id"] for item in items]


def test_a_chain_over_a_restart(folder: Path) -> None:
    store = ResponseStore(folder, 10_000_000)
    store.put("me", response("a"))
    store.put("me", response("b", "a"))
    store.put("me", response("c", "b"))
    assert ids(done(store.chain("me", "c"))) == ["in_a", "msg_a", "in_b", "msg_b", "in_c", "msg_c"]
    done(store.close())
    store = ResponseStore(folder, 10_000_000)
    assert ids(done(store.chain("me", "b"))) == ["in_a", "msg_a", "in_b", "msg_b"]
    found = done(store.get("me", "c"))
    assert found == response("c", "b")
    assert done(store.items("me", ["in_b"])) == {"in_b": response("b").input[0]}
    done(store.close())


def test_only_its_owner_finds_a_response(folder: Path) -> None:
    store = ResponseStore(folder, 10_000_000)
    store.put("me", response("a"))
    for owner in ("you", ""):
        assert done(store.get(owner, "a")) is None
        assert done(store.items(owner, ["msg_a"])) == {}
        assert not done(store.delete(owner, "a"))
        with pytest.raises(InvalidRequestError):
            done(store.chain(owner, "a"))
    store.put("you", response("b", "a"))  # no way to another's conversation
    with pytest.raises(InvalidRequestError):
        done(store.chain("you", "b"))
    assert done(store.delete("me", "a"))
    assert done(store.get("me", "a")) is None
    done(store.close())


def test_a_chain_with_a_gap_is_refused(folder: Path) -> None:
    store = ResponseStore(folder, 10_000_000)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.put("me", response(name, previous))
    done(store.delete("me", "a"))
    with pytest.raises(InvalidRequestError) as caught:
        done(store.chain("me", "c"))
    assert caught.value.code == "previous_response_not_found"
    assert "'a'" in caught.value.message
    assert done(store.items("me", ["msg_a"])) == {}
    done(store.close())


def test_the_longest_unused_go_first(folder: Path) -> None:
    store = ResponseStore(folder, 10_000_000, most=3)
    for name, previous in (("a", None), ("b", "a"), ("c", None)):
        store.put("me", response(name, previous))
    done(store.chain("me", "b"))  # which uses a, too
    store.put("me", response("d"))
    kept = [name for name in "abcd" if done(store.get("me", name)) is not None]
    assert kept == ["a", "b", "d"]
    done(store.close())


def test_bytes_are_bounded(folder: Path) -> None:
    store = ResponseStore(folder, 100_000)
    for number in range(50):
        store.put("me", response(f"r{number}", text="x" * 5_000))
    assert not store.put("me", response("huge", text="x" * 200_000)).result(), "it is not said to be kept"
    kept = [number for number in range(50) if done(store.get("me", f"r{number}")) is not None]
    assert kept == list(range(kept[0], 50))
    assert 5 <= len(kept) <= 20
    assert done(store.get("me", "huge")) is None
    done(store.close())
    assert sum(path.stat().st_size for path in folder.iterdir()) < 400_000


def test_old_responses_go(folder: Path) -> None:
    store = ResponseStore(folder, 10_000_000, seconds=-1)
    store.put("me", response("a"))
    store.put("me", response("b"))
    assert done(store.get("me", "a")) is None
    done(store.close())


def test_a_damaged_file_is_put_aside(folder: Path) -> None:
    folder.mkdir()
    (folder / FILE_NAME).write_bytes(b"no database at all" * 100)
    store = ResponseStore(folder, 10_000_000)
    store.put("me", response("a"))
    assert done(store.get("me", "a")) is not None
    done(store.close())
    assert list(folder.glob("*.damaged"))


def test_a_folder_is_made_with_those_above_it(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "some" / "where" / "kept", 10_000_000)
    assert store.put("me", response("a")).result()
    done(store.close())


def test_a_server_s_file_that_another_has_just_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers that start at once both see that a third has ended."""
    (folder / "servers").mkdir(parents=True)
    (folder / "servers" / "ended").touch()

    def found_dead(where: Path, name: str) -> bool:
        (where / "servers" / name).unlink()
        return False

    monkeypatch.setattr("mlx_parallm.server.api.responses.alive.is_alive", found_dead)
    store = ResponseStore(folder, 10_000_000)
    assert store.put("me", response("a")).result()
    done(store.close())


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = ResponseStore(tmp_path / "file" / "kept", 10_000_000)
    store.put("me", response("a"))
    with pytest.raises(UnavailableError):
        done(store.get("me", "a"))
    done(store.close())


def test_a_damaged_row_is_told_of_and_the_others_stay(folder: Path) -> None:
    store = ResponseStore(folder, 10_000_000)
    for name, previous in (("a", None), ("b", "a"), ("c", None)):
        assert store.put("me", response(name, previous)).result()
    with contextlib.closing(sqlite3.connect(folder / FILE_NAME)) as connection, connection:
        connection.execute("UPDATE responses SET input = ? WHERE id = 'a'", (b"[]",))  # JSON, but another
        connection.execute("UPDATE responses SET output = ? WHERE id = 'c'", (b"{\xff",))
    for name in ("a", "c"):
        with pytest.raises(NotFoundError, match="is damaged on the server's disk"):
            done(store.get("me", name))
    with pytest.raises(InvalidRequestError, match="'a' is damaged") as caught:
        done(store.chain("me", "b"))
    assert caught.value.code == "previous_response_not_found"
    assert done(store.items("me", ["msg_c", "msg_b"])) == {"msg_b": response("b").response["output"][0]}
    assert done(store.get("me", "b")) == response("b", "a")
    done(store.close())


def test_a_file_of_an_earlier_release_is_read_on(folder: Path) -> None:
    store = ResponseStore(folder, 10_000_000)
    store.put("me", response("a"))
    done(store.close())
    with contextlib.closing(sqlite3.connect(folder / FILE_NAME)) as connection, connection:
        for column in ("digest", "server"):
            connection.execute(f"ALTER TABLE responses DROP COLUMN {column}")
    store = ResponseStore(folder, 10_000_000)
    assert done(store.get("me", "a")) == response("a")
    assert store.put("me", response("b", "a")).result()
    assert len(done(store.chain("me", "b"))) == 4
    done(store.close())


def test_the_newest_of_two_items_with_one_id_counts(folder: Path) -> None:
    store = ResponseStore(folder, 10_000_000)
    for name, text in (("a", "old"), ("b", "new")):
        stored = response(name, text=text)
        stored.response["output"][0]["id"] = "msg_same"
        store.put("me", stored)
    assert done(store.items("me", ["msg_same"]))["msg_same"]["text"] == "new"
    done(store.delete("me", "b"))
    assert done(store.items("me", ["msg_same"]))["msg_same"]["text"] == "old"
    done(store.close())


def test_a_response_in_progress_is_abandoned_when_its_server_has_ended(folder: Path) -> None:
    def begun(name: str) -> StoredResponse:
        found = response(name)
        return StoredResponse({**found.response, "status": "in_progress"}, found.input)

    one, other = ResponseStore(folder, 10_000_000), ResponseStore(folder, 10_000_000)
    one.put("me", begun("a")).result()
    other.put("me", begun("b")).result()
    for store in (one, other):
        for name in "ab":
            found = done(store.get("me", name))
            assert found is not None
            assert not found.abandoned
    done(other.close())
    assert [done(one.get("me", name)).abandoned for name in "ab"] == [False, True]  # type: ignore[union-attr]
    done(one.close())


def test_what_the_disk_does_not_take_is_not_said_to_be_kept(folder: Path) -> None:
    store = ResponseStore(folder, 10_000_000)
    assert store.put("me", response("a")).result()
    store._open().execute("PRAGMA max_page_count = 16")  # SQLite's own way to a full disk
    results = [store.put("me", response(f"r{number}", text="x" * 20_000)).result() for number in range(4)]
    assert results[-1] is False
    assert [done(store.get("me", f"r{number}")) is not None for number in range(4)] == results
    store._open().execute("PRAGMA max_page_count = 100000")
    assert store.put("me", response("b")).result()  # there is room again
    done(store.close())


def test_two_servers_share_a_folder(folder: Path) -> None:
    one, other = ResponseStore(folder, 10_000_000), ResponseStore(folder, 10_000_000)
    for number in range(20):
        (one if number % 2 else other).put("me", response(f"r{number}", f"r{number - 1}" if number else None))
        done((one if number % 2 else other).get("me", "x"))  # wait for it
    assert len(done(one.chain("me", "r19"))) == 40
    done(one.close())
    done(other.close())
    with sqlite3.connect(folder / FILE_NAME) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert json.loads(connection.execute("SELECT response FROM responses WHERE id = 'r0'").fetchone()[0])["id"] == "r0"
