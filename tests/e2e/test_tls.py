"""https with a certificate of our own, by httpx, the openai package and our commands; and logs that hold no secrets."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mlx_parallm.client import InferenceClient
from mlx_parallm.http_client import tls_context
from mlx_parallm.server.auth.key_files import changing
from mlx_parallm.server.auth.keys import KeyLimits, entry_of, new_key
from tests.support import forked
from tests.support.servers import ServerProcess, free_port, ours, running
from tests.unit.test_adapters import written

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by the openssl command")

PROMPT = "The password of the safe is swordfish"


@dataclass
class Secured:
    server: ServerProcess
    cert: Path
    secrets: dict[str, str]  # by the name of the key
    audit: Path
    home: Path  # where users have their files

    def client(self, name: str, **options: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.secrets[name]}"}
        return httpx.Client(base_url=self.server.url, headers=headers, verify=self.context, timeout=60, **options)

    @property
    def context(self) -> Any:
        return tls_context(str(self.cert))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def secured(
    tiny_folder: Path, certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    """A server with everything in use, which logs all that it can."""
    folder, (cert, key) = tmp_path_factory.mktemp("secured"), certificate
    file, audit, home = folder / "keys.toml", folder / "audit.jsonl", folder / "home-of-users"
    home.mkdir()
    secrets = {"env": "from-the-environment", "flag": "from-a-flag"}
    with changing(file) as document:
        for name, role in (("user", "user"), ("trainer", "trainer"), ("admin", "admin")):
            secrets[name], made = new_key(name, role, limits=KeyLimits(requests_per_minute=1000))  # type: ignore[arg-type]
            document[name] = entry_of(made)
    flags = ["--tls-cert", str(cert), "--tls-key", str(key), "--keys-file", str(file), "--audit-log", str(audit)]
    flags += ["--api-key", secrets["env"], "--named-key", f"flag:trainer={secrets['flag']}", "--log-level", "DEBUG"]
    flags += ["--log-json", "--enable-rl-training", "--checkpoint-dir", str(folder / "checkpoints")]
    with running(ours(str(tiny_folder), flags, ca=cert)) as server:
        yield Secured(server, cert, secrets, audit, home)


def test_https_by_httpx(secured: Secured) -> None:
    url = secured.server.url
    assert url.startswith("https://")
    assert f"{url}  (described at {url}/docs)" in secured.server.log(), "as a start tells people"
    with secured.client("user") as client:
        assert client.get("/health").json()["status"] == "healthy"
        answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
        assert answer.status_code == 200
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"{secured.server.url}/health")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{secured.server.url.replace('https', 'http')}/health")


def test_https_by_the_openai_package(secured: Secured) -> None:
    http = httpx.Client(verify=secured.context)  # which the package closes
    with openai.OpenAI(
        base_url=f"{secured.server.url}/v1", api_key=secured.secrets["user"], http_client=http, max_retries=0
    ) as client:
        stream = client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": PROMPT}], max_tokens=4, stream=True
        )
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("stop", "length")


async def test_https_by_our_client(secured: Secured) -> None:
    for way in ({"ca": str(secured.cert)}, {"insecure": True}):
        async with InferenceClient(secured.server.url, api_key=secured.secrets["user"], **way) as client:  # type: ignore[arg-type]
            assert (await client.health())["status"] == "healthy"
            assert len((await client.generate([5, 6], max_tokens=2)).completion_ids) in (1, 2)


@pytest.mark.parametrize("way", ["--ca", "--insecure"])
def test_https_by_our_commands(secured: Secured, way: str) -> None:
    trust = ["--ca", str(secured.cert)] if way == "--ca" else ["--insecure"]
    common = ["--url", secured.server.url, "--api-key", secured.secrets["user"]]
    for command in (
        ["adapters", *common, *trust, "list"],
        ["chat", *common, *trust, "-p", PROMPT, "--max-tokens", "2"],
        ["bench", *common, *trust, "--num-requests", "2", "--concurrency", "1", "--output-tokens", "2"],
    ):
        done = forked.run([sys.executable, "-m", "mlx_parallm", *command], 60)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_our_commands_check_the_certificate(secured: Secured, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    for trust, code in (([], 1), (["--ca", str(tmp_path / "none.pem")], 2), (["--ca", str(tmp_path / "ca.pem")], 2)):
        command = [sys.executable, "-m", "mlx_parallm", "adapters", "--url", secured.server.url, *trust, "list"]
        done = forked.run(command, 60)
        assert done.returncode == code, done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_the_cookie_of_a_login_is_secure(secured: Secured) -> None:
    with httpx.Client(base_url=secured.server.url, verify=secured.context) as browser:
        own = {"Origin": secured.server.url}
        answer = browser.post("/dashboard/login", json={"key": secured.secrets["admin"]}, headers=own)
        cookie = answer.headers["set-cookie"].lower()
        assert all(word in cookie for word in ("secure", "httponly", "samesite=strict"))
        assert browser.get("/debug/metrics").status_code == 200


def test_certificates_that_can_not_be_used(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = map(str, certificate)
    locked = str(tmp_path / "locked.pem")
    lock = ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:word", "-out", locked]
    subprocess.run(lock, check=True, capture_output=True)
    for flags, words in (
        (["--tls-cert", cert], "tls_cert needs tls_key too"),
        (["--tls-key", key], "tls_key needs tls_cert too"),
        (["--tls-cert", cert, "--tls-key", "/none.pem"], "tls_key: /none.pem can't be read"),
        (["--tls-cert", key, "--tls-key", cert], "are no PEM certificate and its key"),
        (["--tls-cert", cert, "--tls-key", locked], "without a password"),
        (["--audit-log", "/none/audit"], "audit_log: /none/audit can't be written"),
    ):
        done = forked.run([sys.executable, "-m", "mlx_parallm", "serve", "--port", str(free_port()), *flags], 60)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1


def use_everything(secured: Secured) -> None:
    """Calls of every kind, well and wrong, with secrets, prompts and paths where they can be put."""
    adapter, missing = written(secured.home, "few"), secured.home / "missing"
    with secured.client("user") as user, secured.client("admin") as admin, secured.client("trainer") as trainer:
        chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3}
        user.post("/v1/chat/completions", json=chat)
        user.post("/v1/chat/completions", json=chat | {"stream": True}).read()
        user.post("/generate", json={"prompt": PROMPT, "max_tokens": 2, "request_id": "mine"})
        user.post("/v1/training/feedback", json={"request_id": "mine", "reward": 1.0})
        user.post("/v1/completions", json={"prompt": PROMPT, "temperature": "hot", "model": PROMPT})
        user.post(
            "/v1/completions", content=f'{{"prompt": "{PROMPT}'.encode(), headers={"Content-Type": "application/json"}
        )
        user.post("/v1/completions", json={"prompt": PROMPT * 400, "max_tokens": 2})
        user.post("/tokenize", json={"prompt": PROMPT})
        user.post("/v1/messages", json=chat | {"model": "default"})
        user.post("/v1/messages", json=chat, headers={"x-api-key": secured.secrets["user"] + "x"})
        user.post("/api/chat", json={"messages": chat["messages"], "model": "default", "options": {"num_predict": 2}})
        user.post("/api/show", json={"model": f"{secured.home}/model"})
        stored = user.post("/v1/responses", json={"model": "default", "input": PROMPT, "max_output_tokens": 2}).json()
        user.post("/v1/responses", json={"model": "default", "input": PROMPT, "previous_response_id": PROMPT})
        user.get(f"/v1/responses/{stored.get('id', PROMPT)}")
        user.get(f"/v1/responses/{PROMPT}")
        user.get(f"/v1/models/{secured.secrets['user']}")
        user.get(f"/v1/models{secured.home}/file")
        user.get(f"/nowhere/{secured.secrets['user']}/{PROMPT}")
        user.get("/v1/models", params={"key": secured.secrets["user"], "prompt": PROMPT})
        user.post("/pause")
        for route in ("/v1/adapters/load", "/load_adapter"):
            trainer.post(route, json={"name": "few", "path": str(adapter)})
            trainer.post(route, json={"name": "few", "path": str(missing)})
        trainer.post("/v1/adapters/unload", json={"name": "few"})
        trainer.post("/v1/rl/rollout", json={"prompts": [PROMPT], "n": 2, "max_tokens": 2})
        trainer.post("/v1/training/update", json={"checkpoint_name": "named"})
        trainer.post(f"/pause/{PROMPT}{secured.home}")
        loaded = admin.post("/v1/models/load", json={"model": "gone", "path": str(missing)})
        assert loaded.status_code >= 400
        admin.post("/v1/chat/completions", json=chat | {"model": "gone"})
        for image in (f"file://{secured.home}/swordfish.png", f"https://127.0.0.1/{PROMPT}"):
            part = {"type": "image_url", "image_url": {"url": image}}
            user.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part]}]})
        headers = {"Authorization": f"Bearer {secured.secrets['admin']}x", "Origin": "https://evil.example"}
        user.post("/resume", headers=headers)
        user.get("/v1/models", headers={"Authorization": f"Basic {secured.secrets['admin']}"})
        user.post("/dashboard/login", json={"key": secured.secrets["admin"]})
        user.post("/dashboard/login", json={"key": secured.secrets["admin"] + "x"})
        user.post("/dashboard/logout")


def test_logs_hold_no_keys_prompts_or_paths_of_users(secured: Secured) -> None:
    use_everything(secured)
    log, audit = secured.server.log(), secured.audit.read_text()
    assert '"path":"/v1/chat/completions"' in log
    assert '"path":"/v1/models/{model_id}"' in log
    assert '"key":"user"' in log
    assert "gone can't be loaded" in log
    lines = [json.loads(line) for line in audit.splitlines()]
    assert {line["path"] for line in lines} >= {"/v1/adapters/load", "/v1/models/load", "/dashboard/login", "/pause"}
    assert {line["key"] for line in lines} >= {"user", "trainer", "admin", None}
    for text in (log, audit):
        for name, secret in secured.secrets.items():
            assert secret not in text, name
        assert "parallm_session" not in text
        assert "swordfish" not in text
        assert "home-of-users" not in text
