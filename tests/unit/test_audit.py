"""The audit log as a file, and the images of a tenant; no server."""

import json
from pathlib import Path

import numpy as np
import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.server.auth.audit import AuditLog
from mlx_parallm.server.generation.tokenizers import TokenizedPrompts, own_images
from mlx_parallm.server.http.request_state import enter, route_name
from mlx_parallm.server.http.route_table import UNKNOWN, Route, RouteTable, not_ours
from mlx_parallm.types import ImageInput, PromptImages


def test_lines_are_appended_and_the_file_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"old": true}\n')
    path.chmod(0o644)
    audit = AuditLog(path)
    audit.write(key="a", path="/pause", status=200)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (lines[0], lines[1]["key"], sorted(lines[1])) == ({"old": True}, "a", ["key", "path", "status", "time"])
    assert path.stat().st_mode & 0o777 == 0o600
    audit.close()


def test_a_file_that_was_moved_away_is_opened_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, old = tmp_path / "audit.jsonl", tmp_path / "audit.1"
    audit = AuditLog(path)
    audit.write(number=1)
    path.rename(old)
    audit.write(number=2)
    audit.reopen()
    audit.write(number=3)
    assert [json.loads(line)["number"] for line in old.read_text().splitlines()] == [1, 2]
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [3]
    path.unlink()
    path.mkdir()
    audit.reopen()
    assert "the file that was open before" in caplog.text
    audit.close()
    audit.write(number=4)
    assert "the audit log can't be written" in caplog.text


def test_a_file_that_can_not_be_written_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"audit_log: .* can't be written: No such file"):
        AuditLog(tmp_path / "none" / "audit.jsonl")


def test_a_path_is_called_by_its_route() -> None:
    paths = ("/v1/models/{name:path}", "/v1/models/load", "/pause", "/a/{b}/c")
    routes = RouteTable(Route(path, "POST", not_ours) for path in paths)
    for path, found in (
        ("/pause", "/pause"),
        ("/v1/models/load", "/v1/models/load"),
        ("/v1/models/home/secret", "/v1/models/{name}"),
        ("/a/secret/c", "/a/{b}/c"),
        ("/a/secret/d", UNKNOWN),
        ("/pause/secret", UNKNOWN),
        ("", UNKNOWN),
    ):
        for method in ("POST", "GET"):
            scope = {"method": method, "path": path}
            enter(scope, routes)
            assert route_name(scope) == found


def test_features_of_images_are_kept_for_each_tenant() -> None:
    image = ImageInput(bytes(range(16)), {"pixels": np.zeros(1)}, [1])
    prompts = TokenizedPrompts([[1, 2]], images=PromptImages([image], [[0]], [1, 2]))

    def digests(tenant: str | None) -> tuple[bytes, ...]:
        images = own_images(prompts, tenant).images
        assert images is not None
        return images.digests

    assert digests(None) == (image.digest,)
    assert digests("alice") == digests("alice") != digests("bob") != digests(None)
    assert len(digests("alice")[0]) == 16
    assert own_images(TokenizedPrompts([[1]]), "alice").images is None
