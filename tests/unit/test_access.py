"""Keys, roles and origins, without a server: requests go through ASGI straight to the two guards."""

from dataclasses import replace

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.server.api import route_table
from mlx_parallm.server.auth.access import (
    AccessControl,
    Authentication,
    OriginGuard,
    answered_hosts,
    check_exposure,
    is_loopback,
    is_loopback_address,
)
from mlx_parallm.server.auth.caller import Caller
from mlx_parallm.server.auth.keys import Key, KeyLimits, KeyRing, Role
from mlx_parallm.server.auth.logins import COOKIE, Logins
from mlx_parallm.server.http.request_state import state_of
from tests.rights import ADMIN, ALL, OPEN, TRAINER, USER, rights_of

ROUTES = route_table()

SECRETS: dict[str, str] = {"user": "open", "trainer": "teach", "admin": "sesame"}


def keys(*roles: Role) -> list[Key]:
    return [Key.of(role, role, SECRETS[role]) for role in roles]


def guarded(app: ASGIApp, *given: Key | Role) -> Authentication:
    """An application behind keys, or behind those of some roles."""
    found = [key for one in given for key in ([one] if isinstance(one, Key) else keys(one))]
    return Authentication(app, AccessControl(KeyRing(found)), ROUTES)


async def ask(app: ASGIApp, path: str, method: str = "GET", **options: object) -> tuple[int, str | None, str]:
    """The status, the error's code and its message; 200 comes from behind the guard."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
        answer = await client.request(method, path, **options)  # type: ignore[arg-type]
    if answer.status_code == 200:
        assert answer.text == "behind"
        return 200, None, ""
    error = answer.json()["error"]
    if isinstance(error, str):  # in Ollama's shape
        return answer.status_code, None, error
    return answer.status_code, error.get("code"), error["message"]


def bearer(secret: str) -> dict[str, dict[str, str]]:
    return {"headers": {"Authorization": f"Bearer {secret}"}}


BEHIND = PlainTextResponse("behind")


ALLOWED = {
    "open": (200, 200, 200, 200),
    "user": (401, 200, 200, 200),
    "trainer": (401, 403, 200, 200),
    "admin": (401, 403, 403, 200),
}


@pytest.mark.parametrize("path", sorted(ALL))
async def test_every_route_with_every_key(path: str) -> None:
    guard = guarded(BEHIND, "user", "trainer", "admin")
    allowed = ALLOWED[rights_of(path)]
    assert (await ask(guard, path))[0] == allowed[0]
    assert (await ask(guard, path, **bearer("guess")))[0] == allowed[0]
    for role, status in zip(("user", "trainer", "admin"), allowed[1:], strict=True):
        assert (await ask(guard, path, **bearer(SECRETS[role])))[0] == status, role


def test_every_route_has_the_role_that_it_should_have() -> None:
    assert sum(map(len, (OPEN, USER, TRAINER, ADMIN))) == len(ALL)
    declared = {route.name: route.role or "open" for route in ROUTES.routes}
    assert {path: declared[path] for path in ALL} == {path: rights_of(path) for path in ALL}
    assert {path for path, role in declared.items() if role == "open"} == OPEN | {"/dashboard/static/{name}"}


def test_a_path_has_one_role_and_what_is_not_there_that_of_its_neighbours() -> None:
    roles: dict[str, set[str | None]] = {}
    for route in ROUTES.routes:
        roles.setdefault(route.path, set()).add(route.role)
    assert {path: found for path, found in roles.items() if len(found) > 1} == {}
    for path in ("/no/such/path", "/v1/nobody", "/api/nobody", "/v1/chat/completions/x", "/dashboard/nobody"):
        assert ROUTES.find("POST", path).role == "user", path
    for path in ("/pause/x/y", "/v1/adapters/nobody", "/training/nobody"):
        assert ROUTES.find("POST", path).role == "trainer", path
    for path in ("/debug/nobody", "/model/nobody"):
        assert ROUTES.find("GET", path).role == "admin", path
    assert ROUTES.find("POST", "/pause/x").is_audited
    assert ROUTES.find("GET", "/v1/models/load").role == "admin"  # a method that is not there
    assert ROUTES.find("GET", "/v1/models/home/model").role == "user"


def test_what_stands_in_the_audit_log() -> None:
    audited = {path for path in ALL if any(route.is_audited for route in ROUTES.routes if route.name == path)}
    changing = {path for path in ALL if any(route.changes for route in ROUTES.routes if route.name == path)}
    assert audited - TRAINER - ADMIN == {
        "/v1/training/feedback",
        "/v1/rl/rollout",
        "/dashboard/login",
        "/dashboard/logout",
    }
    assert audited >= (TRAINER | ADMIN) & changing
    assert not any(ROUTES.find("GET", path).is_audited for path in ALL)


def test_what_counts_in_the_limits_of_a_key() -> None:
    def counts(method: str, path: str) -> bool:
        return ROUTES.find(method, path).is_counted

    assert counts("POST", "/v1/chat/completions")
    assert counts("POST", "/v1/responses")
    assert counts("POST", "/no/such/path")
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/v1/chat/completions"),
        ("POST", "/dashboard/login"),
        ("POST", "/metrics"),
        ("POST", "/v1/responses/input_tokens"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("DELETE", "/v1/responses/resp_1"),
    ):
        assert not counts(method, path), path


async def test_who_calls_is_noted_for_logs_and_for_what_is_stored() -> None:
    noted: list[Scope] = []

    async def note(scope: Scope, receive: Receive, send: Send) -> None:
        noted.append(scope)
        await BEHIND(scope, receive, send)

    guard = guarded(note, "user", "admin")
    await ask(guard, "/v1/models", **bearer("open"))
    await ask(guard, "/v1/models", **bearer("sesame"))
    await ask(guard, "/health")
    states = [state_of(scope) for scope in noted]
    assert [state.key_name for state in states] == ["user", "admin", None]
    assert [state.is_admin for state in states] == [False, True, False]
    assert states[1].caller.key is not None
    assert states[1].caller.key.role == "admin"


async def test_the_files_of_the_dashboard_need_no_key_and_its_data_an_admin_s() -> None:
    guard = guarded(BEHIND, "admin")
    assert (await ask(guard, "/dashboard/static/views/live.js"))[0] == 200
    for path in ("/dashboard/events", "/dashboard/snapshot", "/dashboard/requests", "/dashboard/rollouts"):
        assert (await ask(guard, path))[0] == 401


async def test_the_route_gets_the_request_s_own_body() -> None:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse((await receive())["body"])(scope, receive, send)

    guards = OriginGuard(guarded(echo, "user"), None, [], ROUTES)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guards), base_url="http://x") as calls:
        answer = await calls.post("/v1/completions", content=b"{}", headers={"content-type": "application/json"})
        assert answer.status_code == 401
        headers = {"content-type": "application/json", "authorization": "Bearer open"}
        assert (await calls.post("/v1/completions", content=b'{"a": 1}', headers=headers)).text == '{"a": 1}'


async def test_without_keys_everybody_may_do_everything() -> None:
    guard = guarded(BEHIND)
    assert (await ask(guard, "/pause"))[0] == (await ask(guard, "/v1/models"))[0] == 200


async def test_an_admins_key_alone_guards_admin_routes_alone() -> None:
    guard = guarded(BEHIND, "admin")
    assert (await ask(guard, "/v1/completions"))[0] == 200
    status, code, message = await ask(guard, "/pause")
    assert (status, code, "Authorization: Bearer KEY" in message) == (401, "invalid_api_key", True)
    assert (await ask(guard, "/pause", **bearer("sesame")))[0] == 200


async def test_a_users_key_alone_opens_no_admin_route() -> None:
    guard = guarded(BEHIND, "user")
    status, _, message = await ask(guard, "/model/switch-lora", **bearer("open"))
    assert (status, "--admin-key" in message) == (403, True)
    status, _, message = await ask(guard, "/pause", **bearer("open"))
    assert (status, "--role trainer" in message) == (403, True)
    assert (await ask(guard, "/pause"))[0] == 401


async def test_a_trainers_key_closes_users_routes_and_opens_them() -> None:
    guard = guarded(BEHIND, "trainer")
    assert (await ask(guard, "/v1/models"))[0] == 401
    assert (await ask(guard, "/v1/models", **bearer("teach")))[0] == 200


@pytest.mark.parametrize(
    "header", ["", "open", "Bearer", "Bearer ", "Basic open", "bearer  open", "Bearer open x", "Bearer OPEN"]
)
async def test_headers_that_hold_no_key(header: str) -> None:
    guard = guarded(BEHIND, "user")
    assert (await ask(guard, "/v1/models", headers={"Authorization": header}))[0] == 401


async def test_the_scheme_may_be_written_in_any_case() -> None:
    guard = guarded(BEHIND, "user")
    assert (await ask(guard, "/v1/models", headers={"Authorization": "bEARER open"}))[0] == 200
    wrong = await ask(guard, "/v1/models", **bearer("guess"))
    assert wrong == (401, "invalid_api_key", "the key is wrong")


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded"])
async def test_bodies_need_no_type_unless_a_page_sends_them(kind: str | None) -> None:
    guard = OriginGuard(BEHIND, None, ["https://friend.example"], ROUTES)
    headers = {} if kind is None else {"Content-Type": kind}
    friend = headers | {"Origin": "https://friend.example"}
    for path in ("/api/chat", "/v1/completions"):
        assert (await ask(guard, path, "POST", content=b"{}", headers=headers))[0] == 200
        assert (await ask(guard, path, "POST", content=b"{}", headers=friend))[0] == 400


async def test_a_key_may_come_as_x_api_key() -> None:
    guard = guarded(BEHIND, "user", "admin")
    assert (await ask(guard, "/v1/messages", headers={"x-api-key": "open"}))[0] == 200
    assert (await ask(guard, "/pause", headers={"x-api-key": "sesame"}))[0] == 200
    assert (await ask(guard, "/pause", headers={"x-api-key": "open"}))[0] == 403
    for wrong in ("", "guess", "Bearer open"):
        assert (await ask(guard, "/v1/messages", headers={"x-api-key": wrong}))[0] == 401
    both = {"x-api-key": "open", "Authorization": "Bearer none"}
    assert (await ask(guard, "/v1/messages", headers=both))[0] == 200, "one of the two is enough"


@pytest.mark.parametrize(
    ("roles", "secret", "is_admin"),
    [
        ((), None, True),
        (("user",), "open", False),
        (("admin",), None, False),
        (("admin",), "sesame", True),
        (("user", "admin"), "open", False),
        (("user", "admin"), "sesame", True),
    ],
)
async def test_the_route_knows_whether_an_admin_asks(
    roles: tuple[Role, ...], secret: str | None, is_admin: bool
) -> None:
    async def tell(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(str(state_of(scope).is_admin))(scope, receive, send)

    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded(tell, *roles)), base_url="http://x") as calls:
        assert (await calls.get("/api/chat", headers=headers)).text == str(is_admin)


async def test_a_key_with_two_roles_is_an_admins() -> None:
    user, admin = Key.of("a", "user", "x"), Key.of("b", "admin", "x")
    for both in ([user, admin], [admin, user]):
        assert (await ask(guarded(BEHIND, *both), "/pause", **bearer("x")))[0] == 200


async def test_what_is_no_http_passes_both_guards() -> None:
    seen = []

    async def app(scope: dict[str, str], receive: object, send: object) -> None:
        seen.append(scope["type"])

    for guard in (guarded(app, "user"), OriginGuard(app, ["llm"], [], ROUTES)):  # type: ignore[arg-type]
        await guard({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan", "lifespan"]


LIMITED = Key.of("bob", "user", "b", limits=KeyLimits(requests_per_minute=2))


async def raw(app: ASGIApp, path: str, method: str = "POST", **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
        return await client.request(method, path, headers=headers)


async def test_every_answer_to_a_limited_key_tells_what_is_left() -> None:
    guard = guarded(BEHIND, LIMITED, "admin")
    told = []
    for path, method in (
        ("/v1/models", "GET"),
        ("/v1/completions", "POST"),
        ("/pause", "POST"),
        ("/v1/completions", "POST"),
        ("/health", "GET"),
    ):
        answer = await raw(guard, path, method, Authorization="Bearer b")
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert "x-ratelimit-limit-tokens" not in answer.headers
        told.append((answer.status_code, answer.headers["x-ratelimit-remaining-requests"]))
    assert told == [(200, "2"), (200, "1"), (403, "0"), (429, "0"), (200, "0")]
    assert 1 <= int((await raw(guard, "/x", Authorization="Bearer b")).headers["retry-after"]) <= 61
    assert "x-ratelimit-limit-requests" not in (await raw(guard, "/x", Authorization="Bearer sesame")).headers


async def test_a_request_leaves_however_it_ends() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError

    access = AccessControl(KeyRing([Key.of("c", "user", "c", limits=KeyLimits(concurrency=1))]))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await raw(Authentication(fail, access, ROUTES), "/v1/completions", Authorization="Bearer c")
    assert (await raw(Authentication(BEHIND, access, ROUTES), "/x", Authorization="Bearer c")).status_code == 200


async def test_a_cookie_has_the_role_of_its_key() -> None:
    ring = KeyRing(keys("user", "trainer", "admin"))
    access = AccessControl(ring)
    guard = Authentication(BEHIND, access, ROUTES)
    for role, allowed in (("user", (200, 403, 403)), ("trainer", (200, 200, 403)), ("admin", (200, 200, 200))):
        token = access.logins.begin(next(key for key in ring.keys if key.role == role))
        cookie = f"other=1; {COOKIE}={token}"
        paths = ("/v1/models", "/pause", "/model/switch-lora")
        assert tuple([(await raw(guard, path, Cookie=cookie)).status_code for path in paths]) == allowed
        access.logins.end(token)
        assert (await raw(guard, "/v1/models", Cookie=cookie)).status_code == 401


async def test_a_cookie_is_for_the_servers_own_pages_alone() -> None:
    access = AccessControl(KeyRing(keys("admin", "user")))
    cookie = f"{COOKIE}={access.logins.begin(access.ring.keys[0])}"
    guard = OriginGuard(Authentication(BEHIND, access, ROUTES), None, ["*"], ROUTES)
    assert (await raw(guard, "/pause", Cookie=cookie, Origin="http://localhost:8000")).status_code == 200
    for origin in ("http://localhost:3000", "https://evil.example", "null"):
        assert (await raw(guard, "/pause", Cookie=cookie, Origin=origin)).status_code == 401
        headers = {"Origin": origin, "Authorization": "Bearer sesame"}
        assert (await raw(guard, "/pause", **headers)).status_code == 200


@pytest.mark.parametrize("cookie", [f"{COOKIE}=", f"{COOKIE}=guess", "x", f"{COOKIE}=\x7f;;=", "=" * 5000])
async def test_cookies_that_mean_nothing(cookie: str) -> None:
    assert (await raw(guarded(BEHIND, "user"), "/v1/models", Cookie=cookie)).status_code == 401


def test_logins_end_in_time_and_with_their_key() -> None:
    now = [0.0]
    ring = KeyRing(keys("user"))
    logins = AccessControl(ring).logins
    logins.clock = lambda: now[0]
    token = logins.begin(ring.keys[0])
    now[0] = logins.seconds - 1
    assert logins.find(token) == ring.keys[0]
    now[0] += 1
    assert logins.find(token) is None
    token = logins.begin(ring.keys[0])
    ring.fixed = [Key.of("user", "user", "another")]
    assert logins.find(token) is None
    ring.fixed = [Key.of("user", "user", "open", limits=KeyLimits(concurrency=1))]
    assert logins.find(token) == ring.fixed[0], "what was changed of the key holds at once"
    logins.end(token)
    assert logins.find(token) is None
    assert logins.find(logins.begin(ring.fixed[0])) == ring.fixed[0], "another session goes on"


def test_logins_hold_wherever_the_secret_is_known() -> None:
    one, other, stranger = (Logins(KeyRing(keys("user", "admin")), secret) for secret in (b"s", b"s", b"t"))
    user, admin = one.ring.keys
    token = one.begin(user)
    assert other.find(token) == user
    assert stranger.find(token) is None
    claims, _, signature = token.rpartition(".")
    expires, nonce, name = claims.split(".")
    raised = one.begin(admin).split(".")[2]
    for forged in (
        f"{expires}.{nonce}.{raised}.{signature}",
        f"{int(expires) + 1}.{nonce}.{name}.{signature}",
        f"nan.{nonce}.{name}.{signature}",
        claims,
        f"{claims}.{signature}x",
        f"{claims}.é",
    ):
        assert one.find(forged) is None


def local() -> OriginGuard:
    return OriginGuard(BEHIND, ["LLM.example"], ["https://App.example/"], ROUTES)


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
    guard = OriginGuard(BEHIND, hosts, [], ROUTES)
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
    assert (await ask(local(), "/resume", "GET", **foreign))[0] == 403
    assert (await ask(local(), "/resume", "OPTIONS", **foreign))[0] == 200


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
    anybody = OriginGuard(BEHIND, None, ["*"], ROUTES)
    assert (await ask(anybody, "/resume", "POST", headers={"Origin": "https://evil.example"}))[0] == 200


async def test_a_long_origin_is_cut_in_the_answer() -> None:
    _, _, message = await ask(local(), "/resume", "POST", headers={"Origin": "x" * 5000})
    assert 400 < len(message) < 600


PAGE = {"Sec-Fetch-Mode": "no-cors"}  # a browser's request


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
    status, code, _ = await ask(local(), path, "POST", headers=headers | PAGE, content=content)
    assert (status, code) == ((200, None) if fits else (400, "unsupported_media_type"))


async def test_a_body_of_unknown_length_is_a_body() -> None:
    async def parts() -> object:
        yield b"{}"

    assert (await ask(local(), "/resume", "POST", content=parts(), headers=PAGE))[0] == 400


async def test_the_refusal_says_what_to_send() -> None:
    async def message(path: str, kind: str) -> str:
        return (await ask(local(), path, "POST", headers={"Content-Type": kind} | PAGE, content=b"x"))[2]

    assert (await message("/resume", "text/plain")).endswith("application/json; it came as text/plain")
    assert "'Content-Type: application/octet-stream'; it came as" in await message(
        "/update_adapter_weights", "text/plain"
    )
    assert (await message("/update_adapter_weights", "text/plain")).startswith("the body must be JSON, sent with")
    form = await message("/update_adapter_weights", "application/x-www-form-urlencoded")
    assert form.startswith("the body must be JSON, sent with")
    assert "as a form (application/x-www-form-urlencoded), which is what curl -d" in form
    for path in ("/v1/adapters/upload", "/upload_adapter"):
        assert (await message(path, "text/plain")).startswith("the files must come as a form: curl -F name=NAME")
    assert len(await message("/resume", "x" * 500)) < 250
    assert not (await ask(local(), "/resume", "POST", content=b"x", headers=PAGE))[2].endswith("it came as ")


@pytest.mark.parametrize(
    ("name", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("10.0.0.1", False), ("x", False)],
)
def test_loopback_addresses(name: str, loopback: bool) -> None:
    assert is_loopback_address(name) is loopback


def test_the_names_that_a_server_answers_to() -> None:
    def config(host: str, *allowed: str) -> ServeConfig:
        return ServeConfig(http=replace(ServeConfig().http, host=host, allowed_host=allowed))

    assert answered_hosts(config("127.0.0.1")) == ["127.0.0.1"]
    assert answered_hosts(config("0.0.0.0")) is None
    assert answered_hosts(config("0.0.0.0", "llm.example")) == ["0.0.0.0", "llm.example"]
    assert answered_hosts(config("localhost", "a", "b")) == ["localhost", "a", "b"]


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


def test_users_see_no_paths_of_the_server_and_others_do() -> None:
    anybody, user, admin = Caller(), *(Caller(Key.of("a", role, "sk-a")) for role in ("user", "admin"))
    for path in ("/home/me/models/mine", "~/models/mine", "./models/mine"):
        assert [caller.visible_source(path) for caller in (anybody, user, admin)] == [path, "mine", path]
    for caller in (anybody, user, admin):
        assert caller.visible_source("owner/name") == "owner/name", "a name of a hub is no path"
