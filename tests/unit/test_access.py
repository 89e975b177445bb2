"""Keys, roles and origins, without a server: requests go through ASGI straight to the two guards."""

from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.server.access import (
    ADMIN_PREFIXES,
    OPEN_PATHS,
    UPLOAD_PATHS,
    Authentication,
    Key,
    OriginGuard,
    Role,
    check_exposure,
    is_loopback,
    is_loopback_address,
    keys_of,
    read_keys,
)
from tests.rights import ADMIN, OPEN, USER


def keys(*roles: Role) -> list[Key]:
    return [Key.of(role, role, {"user": "open", "admin": "sesame"}[role]) for role in roles]


async def ask(app: ASGIApp, path: str, method: str = "GET", **options: object) -> tuple[int, str | None, str]:
    """The status, the error's code and its message; 200 comes from behind the guard."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
        answer = await client.request(method, path, **options)  # type: ignore[arg-type]
    if answer.status_code == 200:
        assert answer.text == "behind"
        return 200, None, ""
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


def bearer(secret: str) -> dict[str, dict[str, str]]:
    return {"headers": {"Authorization": f"Bearer {secret}"}}


BEHIND = PlainTextResponse("behind")


@pytest.mark.parametrize("path", sorted(OPEN | USER | ADMIN))
async def test_every_route_with_every_key(path: str) -> None:
    guard = Authentication(BEHIND, keys("user", "admin"))
    rights = "open" if path in OPEN else "user" if path in USER else "admin"
    allowed = {"open": (200, 200, 200), "user": (401, 200, 200), "admin": (401, 403, 200)}[rights]
    assert (await ask(guard, path))[0] == allowed[0]
    assert (await ask(guard, path, **bearer("guess")))[0] == allowed[0]
    assert (await ask(guard, path, **bearer("open")))[0] == allowed[1]
    assert (await ask(guard, path, **bearer("sesame")))[0] == allowed[2]


def test_no_prefix_of_admin_routes_is_idle_and_none_covers_a_users_route() -> None:
    for prefix in ADMIN_PREFIXES:
        assert any(path.startswith(prefix) for path in ADMIN), prefix
        others = [other for other in ADMIN_PREFIXES if other != prefix]
        assert any(not path.startswith(tuple(others)) for path in ADMIN), f"{prefix} could be left out"
        assert not any(path.startswith(prefix) for path in USER | OPEN), prefix
    assert OPEN_PATHS == OPEN


async def test_the_route_gets_the_request_s_own_body() -> None:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse((await receive())["body"])(scope, receive, send)

    guards = OriginGuard(Authentication(echo, keys("user")), None, [])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guards), base_url="http://x") as calls:
        answer = await calls.post("/v1/completions", content=b"{}", headers={"content-type": "application/json"})
        assert answer.status_code == 401
        headers = {"content-type": "application/json", "authorization": "Bearer open"}
        assert (await calls.post("/v1/completions", content=b'{"a": 1}', headers=headers)).text == '{"a": 1}'


async def test_without_keys_everybody_may_do_everything() -> None:
    guard = Authentication(BEHIND, [])
    assert (await ask(guard, "/pause"))[0] == (await ask(guard, "/v1/models"))[0] == 200


async def test_an_admins_key_alone_guards_admin_routes_alone() -> None:
    guard = Authentication(BEHIND, keys("admin"))
    assert (await ask(guard, "/v1/completions"))[0] == 200
    status, code, message = await ask(guard, "/pause")
    assert (status, code, "Authorization: Bearer KEY" in message) == (401, "invalid_api_key", True)
    assert (await ask(guard, "/pause", **bearer("sesame")))[0] == 200


async def test_a_users_key_alone_opens_no_admin_route() -> None:
    guard = Authentication(BEHIND, keys("user"))
    status, _, message = await ask(guard, "/pause", **bearer("open"))
    assert (status, "--admin-key" in message) == (403, True)
    assert (await ask(guard, "/pause"))[0] == 401


@pytest.mark.parametrize(
    "header", ["", "open", "Bearer", "Bearer ", "Basic open", "bearer  open", "Bearer open x", "Bearer OPEN"]
)
async def test_headers_that_hold_no_key(header: str) -> None:
    guard = Authentication(BEHIND, keys("user"))
    assert (await ask(guard, "/v1/models", headers={"Authorization": header}))[0] == 401


async def test_the_scheme_may_be_written_in_any_case() -> None:
    guard = Authentication(BEHIND, keys("user"))
    assert (await ask(guard, "/v1/models", headers={"Authorization": "bEARER open"}))[0] == 200
    wrong = await ask(guard, "/v1/models", **bearer("guess"))
    assert wrong == (401, "invalid_api_key", "the key is wrong")


async def test_a_key_with_two_roles_is_an_admins() -> None:
    user, admin = Key.of("a", "user", "x"), Key.of("b", "admin", "x")
    for both in ([user, admin], [admin, user]):
        assert (await ask(Authentication(BEHIND, both), "/pause", **bearer("x")))[0] == 200


async def test_what_is_no_http_passes_both_guards() -> None:
    seen = []

    async def app(scope: dict[str, str], receive: object, send: object) -> None:
        seen.append(scope["type"])

    for guard in (Authentication(app, keys("user")), OriginGuard(app, ["llm"], [])):  # type: ignore[arg-type]
        await guard({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan", "lifespan"]


def test_a_key_is_kept_as_its_digest() -> None:
    assert Key.of("a", "user", "secret") == Key.of("a", "user", "secret") != Key.of("a", "user", "Secret")
    key = Key.of("alice", "user", "open")
    assert (key.name, key.role, len(key.digest)) == ("alice", "user", 32)
    assert b"open" not in key.digest


def test_keys_of_flags_and_file(tmp_path: Path) -> None:
    assert keys_of(ServeConfig.of()) == []
    path = tmp_path / "keys.yaml"
    path.write_text("bob: {key: b}\neve: {key: e, role: admin}\n")
    config = ServeConfig.of(api_key="u", admin_key="a", keys_file=str(path))
    assert keys_of(config) == [
        Key.of("user", "user", "u"),
        Key.of("admin", "admin", "a"),
        Key.of("bob", "user", "b"),
        Key.of("eve", "admin", "e"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write names with a key each"),
        ("- a", "write names with a key each"),
        ("{}", "write names with a key each"),
        ("a: [", "can't be read"),
        ("a: secret", "a: expected its key and role, as in 'a: {key: SECRET, role: user}'"),
        ("a: {kee: x}", "a: unknown field 'kee'; did you mean 'key'?"),
        ("a: {rol: x}", "a: unknown field 'rol'; did you mean 'role'?"),
        ("a: {role: admin}", "a: its key is empty or no text"),
        ("a: {key: ' '}", "a: its key is empty or no text"),
        ("a: {key: 5}", "a: its key is empty or no text"),
        ("a: {key: x, role: root}", "a: its role is 'root', and must be user or admin"),
    ],
)
def test_keys_files_that_are_wrong_say_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert f"keys file {path}" in caught.value.message
    assert message in caught.value.message


def test_a_keys_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    for name in ("none", "bytes"):
        with pytest.raises(ConfigError, match="can't be read"):
            read_keys(tmp_path / name)


def local() -> OriginGuard:
    return OriginGuard(BEHIND, ["LLM.example"], ["https://App.example/"])


@pytest.mark.parametrize("host", ["localhost:8000", "ip6-localhost", "127.0.0.1:1", "[::1]", "llm.example:80", ""])
async def test_names_that_the_server_answers_to(host: str) -> None:
    assert (await ask(local(), "/v1/models", headers={"Host": host}))[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "10.0.0.7:8000", "localhost.evil.example", "evil.llm.example"])
async def test_names_that_it_does_not_answer_to(host: str) -> None:
    status, code, message = await ask(local(), "/v1/models", headers={"Host": host})
    name = host.partition(":")[0]
    assert (status, code) == (403, "host_not_allowed")
    assert f"does not answer to {name!r}" in message
    assert f"--allowed-host {name} " in message


@pytest.mark.parametrize("hosts", [None, ["*"], ["a", "*"]])
async def test_any_name_where_nothing_binds_it(hosts: list[str] | None) -> None:
    guard = OriginGuard(BEHIND, hosts, [])
    assert (await ask(guard, "/v1/models", headers={"Host": "evil.example"}))[0] == 200


async def test_a_host_that_is_no_name() -> None:
    status, _, message = await ask(local(), "/v1/models", headers={"Host": "[::1X"})
    assert (status, "does not answer to '[::1x'" in message) == (403, True)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_foreign_pages_may_read_and_change_nothing(method: str) -> None:
    foreign = {"headers": {"Origin": "https://evil.example"}}
    status, code, message = await ask(local(), "/resume", method, **foreign)
    assert (status, code) == (403, "origin_not_allowed")
    assert "a page of 'https://evil.example' may not" in message
    assert "--cors-allow-origin https://evil.example " in message
    assert (await ask(local(), "/resume", "GET", **foreign))[0] == 200


@pytest.mark.parametrize("origin", ["https://app.example", "HTTPS://APP.example", "http://localhost:8000"])
async def test_pages_that_may_call(origin: str) -> None:
    assert (await ask(local(), "/resume", "POST", headers={"Origin": origin}))[0] == 200


@pytest.mark.parametrize(
    "origin", ["http://localhost:8001", "https://app.example.evil", "null", "ftp://localhost:8000"]
)
async def test_pages_that_may_not(origin: str) -> None:
    assert (await ask(local(), "/resume", "POST", headers={"Origin": origin}))[0] == 403


async def test_its_own_pages_over_both_schemes_and_all_where_all_may() -> None:
    own = {"headers": {"Origin": "https://Localhost:8000", "Host": "LOCALHOST:8000"}}
    assert (await ask(local(), "/resume", "POST", **own))[0] == 200
    anybody = OriginGuard(BEHIND, None, ["*"])
    assert (await ask(anybody, "/resume", "POST", headers={"Origin": "https://evil.example"}))[0] == 200


async def test_a_long_origin_is_cut_in_the_answer() -> None:
    _, _, message = await ask(local(), "/resume", "POST", headers={"Origin": "x" * 5000})
    assert 400 < len(message) < 600


@pytest.mark.parametrize(
    ("path", "kind", "content", "fits"),
    [
        ("/resume", None, b"", True),
        ("/resume", "application/json", b"{}", True),
        ("/resume", "Application/JSON; charset=utf-8", b"{}", True),
        ("/resume", "application/problem+json", b"{}", True),
        ("/resume", None, b"{}", False),
        ("/resume", "text/plain", b"{}", False),
        ("/resume", "text/plain", b"", False),
        ("/resume", "application/octet-stream", b"x", False),
        ("/upload_adapter", "application/octet-stream", b"x", True),
        ("/v1/adapters/upload", "multipart/form-data; boundary=x", b"x", True),
        ("/update_adapter_weights", "application/x-safetensors", b"x", True),
        ("/update_adapter_weights", "text/plain", b"x", False),
        ("/update_adapter_weights", None, b"x", False),
    ],
)
async def test_bodies_that_a_browser_sends_unasked_are_refused(
    path: str, kind: str | None, content: bytes, fits: bool
) -> None:
    headers = {"Content-Type": kind} if kind else {}
    status, code, _ = await ask(local(), path, "POST", headers=headers, content=content)
    assert (status, code) == ((200, None) if fits else (400, "unsupported_media_type"))


async def test_a_body_of_unknown_length_is_a_body() -> None:
    async def parts() -> object:
        yield b"{}"

    assert (await ask(local(), "/resume", "POST", content=parts()))[0] == 400


async def test_the_refusal_says_what_to_send() -> None:
    async def message(path: str, kind: str) -> str:
        return (await ask(local(), path, "POST", headers={"Content-Type": kind}, content=b"x"))[2]

    assert (await message("/resume", "text/plain")).endswith("application/json; it came as text/plain")
    assert "'Content-Type: application/octet-stream'; it came as" in await message(
        "/update_adapter_weights", "text/plain"
    )
    assert (await message("/update_adapter_weights", "text/plain")).startswith("the body must be JSON, sent with")
    form = await message("/update_adapter_weights", "application/x-www-form-urlencoded")
    assert form.startswith("the body must be JSON, sent with")
    assert "as a form (application/x-www-form-urlencoded), which is what curl -d" in form
    for path in UPLOAD_PATHS - {"/update_adapter_weights"}:
        assert (await message(path, "text/plain")).startswith("the files must come as a form: curl -F name=NAME")
    assert len(await message("/resume", "x" * 500)) < 250
    assert not (await ask(local(), "/resume", "POST", content=b"x"))[2].endswith("it came as ")


@pytest.mark.parametrize(
    ("name", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("10.0.0.1", False), ("x", False)],
)
def test_loopback_addresses(name: str, loopback: bool) -> None:
    assert is_loopback_address(name) is loopback


def test_loopback_names() -> None:
    assert is_loopback("localhost")
    assert is_loopback("127.0.0.1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("no-such-host.invalid")


@pytest.mark.parametrize(
    ("addresses", "loopback"),
    [
        (["127.0.0.1", "::1%lo0"], True),
        (["127.0.0.1%x"], True),
        (["127.0.0.1", "10.0.0.7"], False),
        ([], False),
    ],
)
def test_a_name_is_loopback_if_all_its_addresses_are(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], loopback: bool
) -> None:
    asked = []

    def resolve(host: str, port: None, *, type: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        asked.append(host)
        return [(2, type, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    assert is_loopback("box.example") is loopback
    assert asked == ["box.example"]


def test_an_address_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getaddrinfo", None)
    assert is_loopback("127.0.0.1")


def test_a_server_that_others_can_reach_needs_keys() -> None:
    for config in (
        ServeConfig.of(host="127.0.0.1"),
        ServeConfig.of(host="0.0.0.0", insecure=True),
        ServeConfig.of(host="0.0.0.0", api_key="k"),
    ):
        check_exposure(config)
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0 lets other machines use this server") as caught:
        check_exposure(ServeConfig.of(host="0.0.0.0"))
    for words in ("mlx_parallm_serve --host 0.0.0.0 --api-key", "mlx_parallm_serve --host 0.0.0.0 --insecure"):
        assert words in caught.value.message
