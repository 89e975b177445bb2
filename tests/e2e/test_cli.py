"""The commands as users run them: real processes, real pipes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_parallm import __version__
from tests.support import forked
from tests.support.servers import ServerProcess, free_port, running

Result = subprocess.CompletedProcess[str]


def parallm(*args: str, stdin: str = "", **environment: str) -> Result:
    command = [sys.executable, "-m", "mlx_parallm", *args]
    env = os.environ | {"PARALLM_LOG_LEVEL": "WARNING"} | environment
    if stdin:
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, env=env)
    return forked.run(command, 120, env)


def assert_one_line(result: Result, code: int, *words: str) -> None:
    """A mistake is told in one line, without a traceback."""
    assert result.returncode == code, result.stderr
    steps = ("MLX ParaLLM", "  importing ", "  loading ")
    assert all(line.startswith(steps) for line in result.stdout.splitlines()), result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line


def test_version() -> None:
    assert parallm("--version").stdout == f"parallm {__version__}\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["serve", "chat", "bench"]),
        (["serve"], ["--model-path", "--model", "--max-batch-size", "--max-batch", "--port", "--config", "--dedupe"]),
        (["chat"], ["--url", "--model-path", "--system", "--temperature"]),
        (["bench"], ["--concurrency", "--rate", "--stream-share", "--plot", "--json"]),
    ],
)
def test_help_names_the_options(command: list[str], words: list[str]) -> None:
    result = parallm(*command, "--help")
    assert result.returncode == 0
    for word in words:
        assert word in result.stdout


def test_help_is_quick_and_loads_no_mlx() -> None:
    heavy = ("mlx", "fastapi", "transformers", "httpx", "rich", "matplotlib")
    code = f"import sys, mlx_parallm.cli.main; print([name for name in {heavy} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_the_serve_command_has_its_own_name() -> None:
    code = "import sys; from mlx_parallm.cli.main import serve_main; sys.exit(serve_main(['--version']))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout == f"mlx_parallm_serve {__version__}\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["frobnicate"], ["frobnicate", "serve"]),
        ([], ["COMMAND"]),
        (["serve", "--no-such-flag"], ["--no-such-flag"]),
        (["serve", "--port", "eighty"], ["--port", "eighty"]),
        (["serve", "--max-body-size", "lots"], ["lots"]),
        (["bench", "--prompt-words", "many"], ["many"]),
        (["bench", "--num-requests", "3", "--duration", "5"], ["not allowed"]),
        (["chat", "--url", "http://x", "--model-path", "y"], ["not allowed"]),
    ],
)
def test_a_wrong_flag_is_named(args: list[str], words: list[str]) -> None:
    result = parallm(*args)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_a_wrong_value_is_one_line(tmp_path: Path) -> None:
    assert_one_line(parallm("serve", "--max-batch-size", "0"), 2, "max_batch_size")
    assert_one_line(parallm("serve", PARALLM_PORT="99999"), 2, "port")
    assert_one_line(parallm("bench", "--stream-share", "3"), 2, "stream_share")
    config = tmp_path / "serve.yaml"
    config.write_text("server:\n  max_batch_sise: 4\n")
    assert_one_line(parallm("serve", "--config", str(config)), 2, "max_batch_sise", "max_batch_size")


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    port = str(free_port())
    assert_one_line(parallm("serve", "--port", port, "--model-path", str(tmp_path / "x.gguf")), 1, "x.gguf")
    assert_one_line(parallm("chat", "--model-path", str(tmp_path / "x.gguf"), "-p", "hi"), 1, "x.gguf")


def test_a_port_in_use_is_one_line(tiny_server: ServerProcess, tiny_folder: Path) -> None:
    port = tiny_server.url.rpartition(":")[2]
    assert_one_line(parallm("serve", "--port", port, "--model-path", str(tiny_folder)), 2, port)


def test_no_server_is_one_line() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert_one_line(parallm("bench", "--url", url), 1, "no server answers", url)
    assert_one_line(parallm("chat", "--url", url), 1, "no server answers", url)


def test_bench_measures_a_server(tiny_server: ServerProcess, tmp_path: Path) -> None:
    table, plot = tmp_path / "out.json", tmp_path / "out.png"
    size = ["--concurrency", "1,4", "--num-requests", "8", "--output-tokens", "3-6", "--ignore-eos"]
    result = parallm("bench", "--url", tiny_server.url, *size, "--json", str(table), "--plot", str(plot))
    assert result.returncode == 0, result.stdout + result.stderr
    for word in ("output tokens/s", "TTFT p95", "inter-token max", "client CPU seconds", "8/8"):
        assert word in result.stdout
    loads = json.loads(table.read_text())
    assert [load["summary"]["concurrency"] for load in loads] == [1, 4]
    for load in loads:
        assert load["summary"]["errors"] == {}
        assert load["summary"]["streams"] == 4
        assert 8 * 3 <= load["summary"]["output_tokens"] <= 8 * 6
    assert loads[0]["summary"]["output_tokens"] == loads[1]["summary"]["output_tokens"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_bench_counts_failures_and_says_so(tiny_server: ServerProcess) -> None:
    result = parallm("bench", "--url", tiny_server.url, "--model", "no-such-model", "--num-requests", "2")
    assert result.returncode == 1
    assert "HTTP 404: model_not_found" in result.stdout
    assert "0/2" in result.stdout


def test_bench_at_a_rate_for_a_while(tiny_server: ServerProcess) -> None:
    load = ["--rate", "20", "--duration", "1", "--endpoint", "completions", "--output-tokens", "2", "--warmup", "0"]
    result = parallm("bench", "--url", tiny_server.url, *load)
    assert result.returncode == 0, result.stdout + result.stderr


def test_chat_on_a_pipe(tiny_server: ServerProcess, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    script = f'hello\n/system be kind\n"""\ntwo\nlines\n"""\nlong \\\nline\n/save {saved}\n/nonsense\n/exit\nnot read\n'
    result = parallm("chat", "--url", tiny_server.url, "--max-tokens", "4", "--seed", "1", stdin=script)
    assert result.returncode == 0, result.stderr
    turns = json.loads(saved.read_text())
    assert turns[0] == {"role": "system", "content": "be kind"}
    assert [turn["content"] for turn in turns if turn["role"] == "user"] == ["hello", "two\nlines", "long \nline"]
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)
    assert result.stderr.count("tokens/s") == 3
    assert "first after" in result.stderr
    assert "no command /nonsense" in result.stderr


def test_chat_forgets_on_reset(tiny_server: ServerProcess, tmp_path: Path) -> None:
    script = f"hello\n/reset\nagain\n/save {tmp_path / 'talk.json'}\n"
    parallm("chat", "--url", tiny_server.url, "--max-tokens", "3", stdin=script)
    turns = json.loads((tmp_path / "talk.json").read_text())
    assert [turn["content"] for turn in turns if turn["role"] == "user"] == ["again"]


def test_chat_tells_the_servers_error_and_goes_on(tiny_server: ServerProcess) -> None:
    script = f"{'too long ' * 3000}\nhello\n"
    result = parallm("chat", "--url", tiny_server.url, "--max-tokens", "3", stdin=script)
    assert result.returncode == 1
    assert "context" in result.stderr
    assert result.stderr.count("first after") == 1


def test_chat_in_this_process(tiny_folder: Path) -> None:
    one = ["--max-tokens", "8", "--temperature", "0", "-p"]
    first = parallm("chat", "--model-path", str(tiny_folder), *one, "hello")
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip()
    piped = parallm("chat", "--model-path", str(tiny_folder), *one, "-", stdin="hello")
    assert piped.stdout == first.stdout


def test_chat_gives_the_same_answer_here_and_there(tiny_server: ServerProcess, tiny_folder: Path) -> None:
    ask = ["--max-tokens", "8", "--temperature", "0", "-p", "hello there"]
    here = parallm("chat", "--model-path", str(tiny_folder), *ask)
    there = parallm("chat", "--url", f"{tiny_server.url}/v1", *ask)
    assert here.stdout == there.stdout


def test_ctrl_c_stops_the_answer_and_not_the_chat(tiny_server: ServerProcess) -> None:
    command = [
        sys.executable,
        "-m",
        "mlx_parallm",
        "chat",
        "--url",
        tiny_server.url,
        "--temperature",
        "1.5",
        "--seed",
        "3",
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, "--max-tokens", "1800"], text=True, **pipes) as chat:  # type: ignore[call-overload]
        chat.stdin.write("go on and on\n")
        chat.stdin.flush()
        chat.stdout.read(1)  # the answer has begun
        chat.send_signal(signal.SIGINT)
        _, errors = chat.communicate("/save\n/exit\n", timeout=60)
    assert chat.returncode == 0, errors
    assert "stopped" in errors
    assert "/save needs a file name" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_the_server_in_order(tiny_folder: Path, number: signal.Signals) -> None:
    port = free_port()
    command = [sys.executable, "-m", "mlx_parallm", "serve", "--model-path", str(tiny_folder), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        lines = []
        while "URL" not in "".join(lines):
            lines.append(server.stdout.readline())
            assert lines[-1], "".join(lines)
        assert f":{port}" in lines[-1]
        server.send_signal(number)
        _, errors = server.communicate(timeout=60)
    assert server.returncode == 0
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "--prot", "1"], ["--prot", "'--port'"]),
        (["serve", "--max-batchsize=3"], ["--max-batchsize", "'--max-batch-size'"]),
        (["bench", "--concurency", "3"], ["--concurency", "'--concurrency'"]),
        (["serve", "stray"], ["stray"]),
        (["serve", "--port", "eighty"], ["'eighty' is not a whole number"]),
        (["serve", "--request-timeout-seconds", "soon"], ["'soon' is not a number"]),
    ],
)
def test_a_mistyped_flag_is_one_line_with_the_nearest(args: list[str], words: list[str]) -> None:
    assert_one_line(parallm(*args), 2, *words)


@pytest.mark.parametrize(
    ("source", "said"),
    [("./no/such/folder", "there is no folder"), ("/no/such", "there is no folder"), ("{empty}", "no config.json")],
)
def test_a_wrong_model_path_is_explained(tmp_path: Path, source: str, said: str) -> None:
    path = source.format(empty=tmp_path)
    assert_one_line(parallm("serve", "--port", str(free_port()), "--model-path", path), 1, said)


def test_what_a_file_says_of_training_does_not_stop_a_start_without_it(tmp_path: Path, tiny_folder: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "rl_training: {enabled: false, atropos_url: 'http://127.0.0.1:1', environment: e.py, update_frequency: 5000}\n"
        "model: {lora_rank: 128}\n"
    )
    port = free_port()
    command = [sys.executable, "-m", "mlx_parallm", "serve", "--port", str(port), "--model-path", str(tiny_folder)]
    with running(ServerProcess([*command, "--config", str(config)], port, "default", fork=True)) as server:
        assert "atropos_url and environment is not used" in server.tail()
    assert_one_line(parallm("serve", "--atropos-url", "http://127.0.0.1:1"), 2, "--enable-rl-training")
