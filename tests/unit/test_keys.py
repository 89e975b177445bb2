"""Keys, their files and their ring: what is read, written and refused; no server."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlx_parallm.cli.main import main
from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.server.auth.key_files import changing
from mlx_parallm.server.auth.keys import (
    LOOK_SECONDS,
    PREFIX,
    Key,
    KeyLimits,
    KeyRing,
    entry_of,
    keys_of,
    new_key,
    read_keys,
)

SUFFIXES = (".json", ".toml", ".yaml")


def test_a_key_is_kept_as_its_digest() -> None:
    assert Key.of("a", "user", "secret") == Key.of("a", "user", "secret") != Key.of("a", "user", "Secret")
    key = Key.of("alice", "user", "open")
    assert (key.name, key.role, len(key.digest)) == ("alice", "user", 32)
    assert "open" not in repr(key)
    assert (key.opens("open"), key.opens("opens"), key.opens("")) == (True, False, False)


def test_new_keys_are_random_and_salted() -> None:
    (first, one), (second, other) = new_key("a", "user"), new_key("a", "user")
    assert first != second
    assert one.salt != other.salt
    assert first.startswith(PREFIX)
    assert len(first) == len(PREFIX) + 43  # 256 bits
    assert (one.opens(first), one.opens(second)) == (True, False)
    assert Key.of("a", "user", first, other.salt).digest != one.digest


def test_a_role_includes_those_before_it() -> None:
    found = {role: [one for one in ("user", "trainer", "admin") if Key.of("a", role, "x").may(one)] for role in ROLES}
    assert found == {"user": ["user"], "trainer": ["user", "trainer"], "admin": ["user", "trainer", "admin"]}


ROLES = ("user", "trainer", "admin")


def test_keys_of_flags_and_file(tmp_path: Path) -> None:
    assert keys_of(ServeConfig.of()) == []
    path = tmp_path / "keys.yaml"
    path.write_text("bob: {key: b}\neve: {key: e, role: admin}\n")
    config = ServeConfig.of(api_key="u", admin_key="a", named_key=("t:trainer=x=y", "u=z"), keys_file=str(path))
    assert keys_of(config) == [
        Key.of("user", "user", "u", shared_cache=True),
        Key.of("admin", "admin", "a", shared_cache=True),
        Key.of("t", "trainer", "x=y"),
        Key.of("u", "user", "z"),
        Key.of("bob", "user", "b"),
        Key.of("eve", "admin", "e"),
    ]


@pytest.mark.parametrize("entry", ["alice", "alice=", "alice:root=SECRET", "=SECRET", "a\nb=SECRET"])
def test_named_keys_that_are_wrong_are_not_repeated(entry: str) -> None:
    with pytest.raises(ConfigError) as caught:
        keys_of(ServeConfig.of(named_key=(entry,)))
    assert "named_key" in caught.value.message
    assert "SECRET" not in caught.value.message.replace("alice:trainer=SECRET", "")


def test_a_name_means_one_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("bob: {key: b}")
    with pytest.raises(ConfigError, match="two keys are called 'bob'"):
        keys_of(ServeConfig.of(named_key=("bob=x",), keys_file=str(path)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it holds no keys"),
        ("- a", "write names with a key each"),
        ("{}", "it holds no keys"),
        ("a: [", "can't be read"),
        ("a: secret", "a: expected its key and role, as in 'a: {key: SECRET, role: user}'"),
        ("a: {kee: x}", "a: unknown field 'kee'; did you mean 'key'?"),
        ("a: {rol: x}", "a: unknown field 'rol'; did you mean 'role'?"),
        ("a: {role: admin}", "a: its key is empty or no text"),
        ("a: {key: ' '}", "a: its key is empty or no text"),
        ("a: {key: 5}", "a: its key is empty or no text"),
        ("a: {key: x, role: root}", "a: its role is 'root', and must be user, trainer or admin"),
        ("a: {key: x, hash: y}", "a: it has both a key and a hash"),
        ("a: {hash: 'sha256:00:11'}", "a: it has a hash that 'parallm keys' did not write"),
        ("a: {hash: 5}", "a: it has a hash that 'parallm keys' did not write"),
        ("a: {key: x, requests_per_minute: 0}", "a: requests_per_minute: expected a whole number above 0, not 0"),
        ("a: {key: x, tokens_per_minute: -1}", "expected a whole number above 0, not -1"),
        ("a: {key: x, tokens_per_minute: .nan}", "expected a whole number above 0, not nan"),
        ("a: {key: x, concurrency: true}", "expected a whole number above 0, not True"),
        ("a: {key: x, concurrency: 1e300}", "expected a whole number above 0"),
        ("a: {key: x, models: a}", "a: models: expected a list of names"),
        ("a: {key: x, adapters: [1]}", "a: adapters: expected a list of names"),
        ("a: {key: x, role: admin, models: [m]}", "a: models and adapters can't be bound for an admin"),
        ("a: {key: x, shared_cache: 1}", "a: shared_cache is true or false, not 1"),
        ('"a\\nb": {key: x}', "a name has 1 to 128 printable characters"),
    ],
)
def test_keys_files_that_are_wrong_say_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert f"keys file {path}" in caught.value.message
    assert message in caught.value.message


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_can_not_be_parsed_is_not_repeated(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"keys{suffix}"
    path.write_text('alice: [SECRET\n[alice\n"SECRET": SECRET')
    with pytest.raises(ConfigError, match="can't be read") as caught:
        read_keys(path)
    assert "SECRET" not in caught.value.message


def test_a_keys_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    for name, reason in (("none", "can't be read"), ("bytes", "can't be read: it is no text")):
        with pytest.raises(ConfigError, match=reason):
            read_keys(tmp_path / name)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_holds_all_of_a_key_but_the_key(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"keys{suffix}"
    names = frozenset({'a"b', "org/model", "ü\x7f\\"})
    limits = KeyLimits(5, 1000, 2)
    secret, key = new_key("alice", "trainer", limits=limits, models=names, adapters=frozenset(), shared_cache=True)
    plain, other = new_key("ops", "admin", created="2026-11-17T10:00:00+00:00")
    with changing(path) as document:
        document |= {"alice": entry_of(key), "ops": entry_of(other)}
    assert read_keys(path) == [key, other]
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret not in path.read_text()
    assert plain not in path.read_text()
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_command_adds_lists_and_removes(
    tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / f"keys{suffix}"
    flags = ["--role", "trainer", "--requests-per-minute", "9", "--model", "m", "--model", "n"]
    assert main(["keys", "add", "alice", "--file", str(path), *flags]) == 0
    told = capsys.readouterr()
    secret = told.out.strip()
    assert secret.startswith(PREFIX)
    assert secret not in told.err
    (key,) = read_keys(path)
    assert key.opens(secret)
    assert (key.role, key.limits, key.models) == ("trainer", KeyLimits(9), {"m", "n"})
    assert main(["keys", "add", "alice", "--file", str(path)]) == 2
    assert "remove it first" in capsys.readouterr().err
    assert main(["keys", "list", "--file", str(path)]) == 0
    listed = capsys.readouterr().out
    assert "alice" in listed
    assert [name.strip() for name in listed.splitlines()[1].strip("┃").split("┃")] == [
        *("name", "role", "requests/min", "tokens/min", "at once", "models", "adapters", "cache", "created")
    ]
    assert key.digest.hex()[:8] not in listed
    assert main(["keys", "remove", "bob", "--file", str(path)]) == 2
    assert main(["keys", "remove", "alice", "--file", str(path)]) == 0
    assert main(["keys", "list", "--file", str(path)]) == 0
    assert "holds no keys" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ("", "--role", "user"),
        ("a", "--concurrency", "0"),
        ("a", "--tokens-per-minute", "-5"),
        ("a", "--role", "admin", "--model", "m"),
    ],
)
def test_a_key_that_could_not_be_read_is_not_written(tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert main(["keys", "add", *flags, "--file", str(tmp_path / "keys.json")]) == 2
    assert os.listdir(tmp_path) == []


def test_nothing_is_made_by_a_removal_or_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert main(["keys", "remove", "a", "--file", str(tmp_path / "keys.json")]) == 2
    assert main(["keys", "add", "a", "--file", str(tmp_path / "none" / "keys.json")]) == 2
    assert os.listdir(tmp_path) == []


def test_keys_that_are_added_together_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def add(name: str) -> None:
        with changing(path) as document:
            document[name] = entry_of(new_key(name, "user")[1])

    threads = [threading.Thread(target=add, args=(f"key{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_keys(path)) == 8


def test_the_command_needs_no_web_framework() -> None:
    code = "import mlx_parallm.server.auth.keys, sys; sys.exit('starlette' in sys.modules or 'mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


def ring_of(path: Path, now: list[float]) -> KeyRing:
    ring = KeyRing.of(ServeConfig.of(keys_file=str(path)))
    ring.clock = lambda: now[0]
    return ring


def test_a_ring_follows_its_file(tmp_path: Path) -> None:
    path, now = tmp_path / "keys.yaml", [1e9]
    path.write_text("bob: {key: b}")
    ring = ring_of(path, now)
    path.write_text("bob: {key: b}\neve: {key: e}")
    ring.refresh()
    assert [key.name for key in ring.keys] == ["bob", "eve"]
    path.write_text("eve: {key: e}")
    ring.refresh()
    assert [key.name for key in ring.keys] == ["bob", "eve"], "it looks once a second"
    now[0] += LOOK_SECONDS
    ring.refresh()
    assert [key.name for key in ring.keys] == ["eve"]


def test_a_ring_whose_file_is_broken_keeps_its_keys_and_one_without_keys_lets_nobody_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("bob: {key: SECRET}")
    ring = ring_of(path, [0.0])
    for text in ("bob: [SECRET", "bob: {kee: SECRET}"):
        path.write_text(text)
        ring.reload()
        assert [key.name for key in ring.keys] == ["bob"]
    path.unlink()
    ring.reload()
    assert [key.name for key in ring.keys] == ["bob"]
    assert "still hold" in caplog.text
    assert "SECRET" not in caplog.text
    path.write_text("{}")
    ring.reload()
    assert ring.keys == []
    assert (ring.guards("user"), ring.guards("admin")) == (True, True)


def test_which_routes_need_a_key(tmp_path: Path) -> None:
    def guards(*roles: str) -> list[bool]:
        ring = KeyRing([Key.of(role, role, role) for role in ROLES if role in roles])
        return [ring.guards(role) for role in ROLES]

    assert guards() == [False, False, False]
    assert guards("admin") == [False, True, True]
    assert guards("trainer") == guards("user") == [True, True, True]
    path = tmp_path / "keys.yaml"
    path.write_text("ops: {key: x, role: admin}")
    ring = KeyRing.of(ServeConfig.of(keys_file=str(path)))
    assert [ring.guards(role) for role in ROLES] == [True, True, True]
