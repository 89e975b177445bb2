"""Who may call what: every route with every kind of key, and what a page in a browser may do without one."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.rights import ALL, rights_of
from tests.support import forked
from tests.support.servers import ServerProcess, free_port, ours, running

KEYS = {"none": None, "user": "open", "trainer": "teach", "admin": "sesame", "wrong": "guess"}
SETS = {
    "all keys": ["--api-key", "open", "--named-key", "tom:trainer=teach", "--admin-key", "sesame"],
    "a user's key": ["--api-key", "open"],
    "an admin's key": ["--admin-key", "sesame"],
    "no key": [],
}
ROLES = ("user", "trainer", "admin")


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[httpx.Client]:
    with running(ours(str(folder), flags)) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        client.server = server  # type: ignore[attr-defined]
        yield client


def expected(rights: str, keys: str, key: str) -> int | None:
    """The refusal that a call must meet; None: it is let in."""
    if rights == "open" or keys == "no key" or (keys == "an admin's key" and rights == "user"):
        return None
    known = {"all keys": ROLES, "a user's key": ("user",), "an admin's key": ("admin",)}[keys]
    if key not in known:
        return 401
    return 403 if ROLES.index(key) < ROLES.index(rights) else None


@pytest.mark.parametrize("keys", SETS)
def test_every_route_with_every_key(tiny_folder: Path, keys: str) -> None:
    wrong: list[str] = []
    with serving(tiny_folder, *SETS[keys]) as client:
        headers = {"Authorization": "Bearer open"} if "--api-key" in SETS[keys] else {}
        paths = client.get("/openapi.json", headers=headers).json()["paths"]
        assert set(paths) <= ALL, "a route has no entry in tests/rights.py"
        for path, methods in paths.items():
            rights = rights_of(path)
            for method in methods:
                for key, secret in KEYS.items():
                    sent = {"Authorization": f"Bearer {secret}"} if secret else {}
                    body = {"json": []} if method == "post" else {}  # no route does anything with a list
                    status = client.request(method, path, headers=sent, **body).status_code  # type: ignore[arg-type]
                    refused = status if status in (401, 403) else None
                    if refused != expected(rights, keys, key):
                        wrong.append(f"{method} {path} with {key} key: {status}")
    assert wrong == []


FOREIGN = "https://evil.example"


@pytest.fixture(scope="module")
def client(tiny_server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, timeout=30) as found:
        yield found


@pytest.mark.parametrize("path", ["/resume", "/pause", "/v1/chat/completions", "/v1/adapters/upload", "/flush_cache"])
@pytest.mark.parametrize("origin", [FOREIGN, "null", "http://localhost:3000", "http://127.0.0.1:1"])
def test_a_foreign_page_can_change_nothing(client: httpx.Client, path: str, origin: str) -> None:
    answer = client.post(path, headers={"Origin": origin, "Content-Type": "text/plain"}, content=b"{}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    form = client.post(path, headers={"Origin": origin}, files={"weights": b"x"}, data={"name": "evil"})
    assert form.status_code == 403
    assert client.get("/is_paused").json() == {"is_paused": False}


def test_the_servers_own_pages_and_programs_may(client: httpx.Client) -> None:
    own = str(client.base_url).rstrip("/")
    assert client.post("/resume", headers={"Origin": own}).status_code == 200
    assert client.post("/resume").status_code == 200
    assert client.post("/resume", json={}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
@pytest.mark.parametrize("path", ["/resume", "/v1/completions", "/v1/training/update"])
def test_only_json_changes_anything(client: httpx.Client, path: str, kind: str) -> None:
    headers = {"Content-Type": kind, "Sec-Fetch-Mode": "no-cors"}  # as a page sends it without asking
    answer = client.post(path, headers=headers, content=b'{"prompt": "hello"}')
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


def test_a_body_without_a_type_is_no_json_of_a_browser(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", content=b'{"prompt": "hello"}', headers={"Referer": "http://a.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_media_type")


def test_weights_that_curl_sent_as_a_form(client: httpx.Client) -> None:
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = client.post("/update_adapter_weights?name=a", headers=kind, content=b"\x00" * 64)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert "application/octet-stream" in message
    assert "curl" in message


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "10.0.0.7", "localhost.evil.example"])
def test_a_foreign_name_is_not_answered(client: httpx.Client, host: str) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", "/resume"), ("GET", "/health")):
        answer = client.request(method, path, headers={"Host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
        assert "--allowed-host" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:99", "[::1]:8000", "127.9.9.9"])
def test_loopback_has_many_names(client: httpx.Client, host: str) -> None:
    assert client.get("/v1/models", headers={"Host": host}).status_code == 200


def test_flags_widen_both(tiny_folder: Path) -> None:
    flags = ["--allowed-host", "llm.example", "--cors-allow-origin", "https://app.example"]
    with serving(tiny_folder, *flags) as client:
        named = {"Host": "llm.example"}
        assert client.get("/v1/models", headers=named).status_code == 200
        assert client.get("/v1/models", headers={"Host": "other.example"}).status_code == 403
        allowed = client.post("/resume", headers={"Origin": "https://app.example"})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        assert client.post("/resume", headers={"Origin": FOREIGN}).status_code == 403
        ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        assert client.options("/v1/completions", headers=ask).status_code == 200


def start(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlx_parallm", "serve", "--port", str(free_port()), *flags]
    return forked.run(command, 60, {**_environment(), **environment})


def _environment() -> dict[str, str]:
    import os

    return {key: value for key, value in os.environ.items() if not key.startswith("PARALLM_")}


@pytest.mark.parametrize("name", ["PARALLM_API_KEY", "PARALLM_ADMIN_KEY", "PARALLM_KEYS_FILE", "PARALLM_AUDIT_LOG"])
def test_an_empty_key_is_an_error(name: str) -> None:
    for value in ("", "  "):
        ended = start(**{name: value})
        assert ended.returncode == 2
        assert name in ended.stderr
        assert "empty" in ended.stderr


def test_a_misspelt_variable_is_named() -> None:
    ended = start(PARALLM_API_KYE="secret")
    assert ended.returncode == 2
    assert "PARALLM_API_KYE" in ended.stderr
    assert "'PARALLM_API_KEY'" in ended.stderr
    assert "secret" not in ended.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_listening_beyond_this_machine_needs_keys_or_leave(host: str) -> None:
    ended = start("--host", host)
    assert ended.returncode == 2
    assert "--api-key" in ended.stderr
    assert "--insecure" in ended.stderr


def test_it_listens_with_keys_or_leave(tiny_folder: Path) -> None:
    for flags in (["--api-key", "open"], ["--insecure"]):
        with serving(tiny_folder, "--host", "0.0.0.0", *flags) as client:
            headers = {"Host": "my-mac.local", "Authorization": "Bearer open"}
            assert client.get("/v1/models", headers=headers).status_code == 200


def test_keys_from_a_file(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("alice: {key: a-secret}\nroot: {key: r-secret, role: admin}\n")
    with serving(tiny_folder, "--keys-file", str(file)) as client:
        for key, statuses in (("a-secret", (200, 403)), ("r-secret", (200, 200)), ("guess", (401, 401))):
            headers = {"Authorization": f"Bearer {key}"}
            found = client.get("/v1/models", headers=headers), client.get("/debug/metrics", headers=headers)
            assert (found[0].status_code, found[1].status_code) == statuses


def test_a_wrong_file_of_keys_ends_the_start(tmp_path: Path) -> None:
    """What can be wrong with one is in tests/unit/test_access.py."""
    file = tmp_path / "keys.yaml"
    file.write_text("alice: {key: x, rolle: user}")
    ended = start("--keys-file", str(file))
    assert ended.returncode == 2
    assert "'role'" in ended.stderr
    assert "Traceback" not in ended.stderr
