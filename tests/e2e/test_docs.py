"""Every example of README.md and docs/*.md, run as a reader would: `doc_examples` says what counts as one.

A section is a test. Its examples run in order in a folder that looks like the repository after `make`, with the server
that the page has started last. Ports 8000 and 8001 are others here. README and GUIDE are served by the embedded model,
the other pages by a tiny one of random weights.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.e2e.doc_examples import PAGES, ROOT, Block, Section, difference, sections
from tests.support.servers import ServerProcess, free_port, running
from tests.tiny import save_tiny, tiny

EMBEDDED_PAGES = ("README.md", "docs/GUIDE.md")
README_LINES = 130
SECONDS = 240  # for one example, on a busy machine
CURL_FAILED = 22  # the exit code of curl where the answer is an error
SHIMS = {"python": "", "mlx_parallm_serve": "-m mlx_parallm serve", "mlx_parallm_train": "-m mlx_parallm train"}
SHIMS |= {"parallm": "-m mlx_parallm"}
REPOSITORY = ("Makefile", "pyproject.toml", "constraints.txt", "benchmarks", "examples", "tests")

ALL = [section for page in PAGES for section in sections(page)]
BLOCKS = [block for section in ALL for block in section.blocks]


class Reader:
    """Who follows a page: a folder, and at most one server."""

    def __init__(self, page: str, folder: Path, tiny_folder: Path) -> None:
        self.folder = folder
        self.port, self.second_port = free_port(), free_port()
        self._serving: Block | None = None
        self._server = ExitStack()
        embedded = page in EMBEDDED_PAGES
        set_up(folder, tiny_folder, (576, 192, 30) if embedded else (64, 32, 2))
        for block in BLOCKS:
            if block.page == page and block.file_name is not None:
                (folder / block.file_name).write_text(block.text + "\n")
        self.environment = {
            "PATH": f"{folder / '.venv/bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "CURL_HOME": str(folder / ".venv"),
            "PARALLM_PORT": str(self.port),
            "COLUMNS": "200",
            "MAKEFLAGS": "",  # of the make that runs the tests, as is ARGS
            "ARGS": "",
            **({} if embedded else {"PARALLM_MODEL_PATH": str(tiny_folder)}),
        }

    def rewritten(self, text: str) -> str:
        """With this test's ports in place of 8000, written or meant, and 8001."""
        url = f"http://127.0.0.1:{self.port}"
        text = re.sub(r"\b(parallm (?:adapters|chat|bench))\b(?!.* --url)", rf"\1 --url {url}", text)
        return re.sub(r"\b8001\b", str(self.second_port), re.sub(r"\b8000\b", str(self.port), text))

    def serve(self, block: Block | None) -> None:
        """Has the server of this block run, and no other."""
        if block is None or (self._serving is not None and block.command == self._serving.command):
            return
        self.close()
        script = f"cd '{self.folder}' || exit\nexec env {self.rewritten(block.command)}"
        self._server.enter_context(
            running(ServerProcess(["bash", "-c", script], self.port, "default", self.environment))
        )
        self._serving = block

    def run(self, block: Block) -> subprocess.CompletedProcess[str]:
        if block.language == "python":
            command = [sys.executable, "-c", self.rewritten(block.text)]
        else:
            command = ["bash", "-euo", "pipefail", "-c", self.rewritten(block.text)]
        env = os.environ | self.environment
        return subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL
        )

    def close(self) -> None:
        self._server.close()
        self._serving = None


def set_up(folder: Path, tiny_folder: Path, sizes: tuple[int, int, int]) -> None:
    """The repository as `make` leaves it, and what the pages take for granted: models and adapters of the reader's."""
    for name in REPOSITORY:
        (folder / name).symlink_to(ROOT / name)
    commands = folder / ".venv" / "bin"
    commands.mkdir(parents=True)
    for name, arguments in SHIMS.items():
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (commands / name).chmod(0o755)
    for stamp in (".installed", ".installed-dev"):
        (folder / ".venv" / stamp).touch()
    (folder / ".venv" / ".curlrc").write_text("silent\nshow-error\nfail-with-body\n")
    for seed, name in enumerate(("math", "math-v2")):
        write_adapter(folder / "adapters" / name, seed, *sizes)
    (folder / "models").mkdir()
    (folder / "models" / "small").symlink_to(tiny_folder)
    (folder / "models" / "large").mkdir()
    save_tiny(tiny("qwen3"), folder / "models" / "large")


def write_adapter(folder: Path, seed: int, hidden: int, values: int, layers: int) -> None:
    """Random, on the last block's q and v, in mlx-lm's format."""
    chance = np.random.default_rng(seed)
    tensors = {}
    for name, size in (("q_proj", hidden), ("v_proj", values)):
        path = f"model.layers.{layers - 1}.self_attn.{name}"
        tensors[f"{path}.lora_a"] = 0.02 * chance.standard_normal((hidden, 4)).astype(np.float32)
        tensors[f"{path}.lora_b"] = 0.02 * chance.standard_normal((4, size)).astype(np.float32)
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "self_attn.v_proj"]}
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": parameters}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapters.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


class Readers:
    """One for each page; only one has a server at a time."""

    def __init__(self, folder: Path, tiny_folder: Path) -> None:
        self._folder = folder
        self._tiny_folder = tiny_folder
        self._readers: dict[str, Reader] = {}

    def of(self, page: str) -> Reader:
        for name, reader in self._readers.items():
            if name != page:
                reader.close()
        if page not in self._readers:
            folder = self._folder / Path(page).stem
            folder.mkdir()
            self._readers[page] = Reader(page, folder, self._tiny_folder)
        return self._readers[page]

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


@pytest.fixture(scope="module")
def readers(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Readers]:
    found = Readers(tmp_path_factory.mktemp("docs"), tiny_folder)
    yield found
    found.close()


def is_slow(section: Section) -> bool:
    """`make test` runs the README's examples and how to start; the rest of the pages is for `make test-all`."""
    return section.is_slow or not (section.page == "README.md" or section.title == "Configure and start")


def parameters() -> Iterator[object]:
    for section in ALL:
        if section.runs:
            name = f"{Path(section.page).stem}: {section.title}"
            yield pytest.param(section, id=name, marks=pytest.mark.slow if is_slow(section) else ())


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples use curl")
@pytest.mark.parametrize("section", list(parameters()))
def test_examples(section: Section, readers: Readers) -> None:
    reader = readers.of(section.page)
    reader.serve(section.server)
    output = ""
    for place, block in enumerate(section.blocks):
        if block.serves:
            reader.serve(block)
        elif block.runs:
            done = reader.run(block)
            output = done.stdout
            told = f"{block.place}\n{block.text}\n--- printed\n{done.stdout}\n{done.stderr}"
            assert done.returncode == (CURL_FAILED if answers_an_error(section.blocks[place + 1 :]) else 0), told
        elif block.is_output and block.marker != "not run":
            problem = difference(block, output)
            assert not problem, f"{block.place}: {problem}\n--- printed\n{output}"


def answers_an_error(behind: list[Block]) -> bool:
    """Whether the page says that the example before these blocks is refused."""
    return bool(behind) and behind[0].language == "json" and "error" in json.loads(behind[0].text)


def test_what_is_left_out_has_a_reason() -> None:
    for block in BLOCKS:
        assert not block.marker or block.reason, f"{block.place}: why is it {block.marker!r}?"
    left_out = [block.place for block in BLOCKS if block.marker == "not run" and "tests/" not in block.reason]
    assert len(left_out) <= 0.2 * len(BLOCKS), left_out


def test_files_are_used() -> None:
    for block in BLOCKS:
        if block.file_name is not None:
            others = [other.text for other in BLOCKS if other.page == block.page and other is not block]
            assert any(block.file_name in text for text in others), f"{block.place}: nothing uses {block.file_name}"
        assert block.language != "yaml" or block.file_name, f"{block.place}: begin it with '# NAME.yaml'"


def test_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize(
    ("language", "said", "printed", "same"),
    [
        ("json", '{"a": {"b": "x…"}, "n": 1}', 'line\n{"a": {"b": "xyz", "c": 1}, "n": 2.5}', True),
        ("json", '{"a": "x"}', '{"a": "y"}', False),
        ("json", '{"a": true}', '{"a": 1}', False),
        ("json", '{"a": [1, 2]}', '{"a": [3]}', True),
        ("json", '{"a": [1, 2]}', '{"a": []}', False),
        ("json", '{"a": ["…", "…"]}', '{"a": ["x"]}', False),
        ("json", '{"a": 1}', '{"a": 1}{"b": 1}', False),
        ("json", '{"a": 1}', "nothing", False),
        ("text", "one … three", "zero\none two three\n", True),
        ("text", "one\nfour", "one\ntwo", False),
    ],
)
def test_what_is_printed_is_compared(language: str, said: str, printed: str, same: bool) -> None:
    assert bool(difference(Block("page", 1, language, said), printed)) != same
