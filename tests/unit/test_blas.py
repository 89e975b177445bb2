"""The BLAS that is loaded before MLX: found, made once, chosen or refused by the user, and really used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_parallm import blas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a Mac has Accelerate")

# Which library the dynamic linker finds for a symbol, and whether MLX's products come out right with it.
PROBE = """
import sys, ctypes
import mlx_parallm, mlx.core as mx
class Found(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("rest", ctypes.c_void_p * 3)]
here = ctypes.CDLL(None)
found = Found()
here.dladdr(ctypes.cast(here.cblas_sgemm, ctypes.c_void_p), ctypes.byref(found))
x = mx.arange(6).reshape(2, 3).astype(mx.float32)
assert (x @ x.T).tolist() == [[5, 14], [14, 50]]
print(found.file.decode())
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_the_module_prints_a_library_and_nothing_else() -> None:
    result = run("-m", "mlx_parallm.blas")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "blas" in Path(result.stdout.strip()).name or "mkl" in Path(result.stdout.strip()).name


def test_mlx_multiplies_with_it() -> None:
    library = run("-m", "mlx_parallm.blas").stdout.strip()
    result = run("-c", PROBE)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).resolve() == Path(library).resolve()


def test_it_can_be_turned_off() -> None:
    result = run("-m", "mlx_parallm.blas", PARALLM_BLAS="none")
    assert result.returncode == 1
    assert result.stderr == "MLX uses its own BLAS here\n"


def test_a_library_that_cannot_be_loaded_is_named_and_the_next_is_taken(tmp_path: Path) -> None:
    result = run("-m", "mlx_parallm.blas", PARALLM_BLAS=str(tmp_path / "libno.so"))
    assert result.returncode == 0
    assert "libno.so can't be used" in result.stderr
    result = run("-m", "mlx_parallm.blas", PARALLM_BLAS="libc.so.6")
    assert "libc.so.6 can't be used: it has no cblas_sgemm" in result.stderr


def test_no_library_at_all_is_one_clear_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.delenv("PARALLM_BLAS", raising=False)
    monkeypatch.setattr(blas, "_wheel_file", lambda wheel, name: None)
    monkeypatch.setattr(blas, "SYSTEM_OPENBLAS", "libno-such-blas.so.0")
    assert blas.preload() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no fast BLAS found" in caplog.text


def test_it_is_too_late_once_mlx_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core  # noqa: F401

    monkeypatch.setenv("PARALLM_BLAS", "/would/be/a/warning.so")
    assert blas.preload() is None


def test_openblas_is_renamed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = blas._wheel_file("scipy-openblas32", "libscipy_openblas.so")
    if library is None:
        pytest.skip("the wheel scipy-openblas32 is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copy = blas._plain_openblas(library, "1")
    made = copy.stat().st_mtime_ns
    assert copy.parent == tmp_path / "mlx-parallm" / "blas"
    assert blas._plain_openblas(library, "1").stat().st_mtime_ns == made
    assert list(copy.parent.iterdir()) == [copy]


@pytest.mark.parametrize("broken", ["--rename-dynamic-symbols", "--set-soname", None])
def test_a_copy_of_openblas_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str | None
) -> None:
    """With a tool in the place of patchelf that copies, or fails at one of its two steps."""
    tool = tmp_path / "patchelf"
    tool.write_text(f'#!/bin/sh\n[ "$1" = "{broken}" ] && exit 1\n[ "$1" = --set-soname ] || cp "$5" "$4"\n')
    tool.chmod(0o755)
    library = tmp_path / "library.so"
    library.write_bytes(b"content")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(blas.sysconfig, "get_path", lambda name: str(tmp_path))
    folder = tmp_path / "mlx-parallm" / "blas"
    if broken is None:
        assert blas._plain_openblas(library, "1").read_bytes() == b"content"
    else:
        with pytest.raises(subprocess.CalledProcessError):
            blas._plain_openblas(library, "1")
        assert list(folder.iterdir()) == []
