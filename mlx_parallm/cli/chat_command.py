"""`parallm chat`: a conversation in the terminal, streamed, with a running server or with a model in this process.

`cli` calls `add_flags` and `run`. On a pipe each input line is a message and stdout holds the answers alone;
notes go to stderr. Ctrl-C stops a response, not the program.
"""

import argparse
import contextlib
import json
import signal
import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from mlx_parallm.cli.remote_commands import DEFAULT_URL
from mlx_parallm.errors import ConfigError, ParallmError, UnavailableError
from mlx_parallm.http_client import add_tls_flags, tls_context
from mlx_parallm.sampling_params import ADJUSTABLE, PARAMETERS, SamplingParams

TEMPERATURE = 0.7  # of a conversation, unless --temperature says another
HELP = """\
/reset          forget the conversation
/system [TEXT]  set the system prompt, or remove it
/save FILE      write the conversation as JSON
/exit           leave (Ctrl-D too)
End a line with \\ to go on with the next, or put several lines between \"\"\" and \"\"\"."""

Message = dict[str, str]


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help=f"a running server (default: {DEFAULT_URL} when one answers there)")
    where.add_argument("--model-path", help="load a model here: hub id, folder or .gguf (default: the embedded one)")
    add("--model", default="default", help="which of the server's models (default: %(default)s)")
    add("--api-key", help="the server's bearer token")
    add_tls_flags(parser)
    add("--system", help="system prompt")
    add("-p", "--prompt", help="ask this one thing and leave; - reads it from stdin")
    for name in ADJUSTABLE:
        parameter = PARAMETERS[name]
        default = TEMPERATURE if name == "temperature" else parameter.default
        shown = "none" if default is None else default
        text = f"{parameter.meaning} (default: {shown})"
        add(f"--{name.replace('_', '-')}", type=int if parameter.whole else float, default=default, help=text)


def run(args: argparse.Namespace) -> int:
    sampling = SamplingParams(**{name: getattr(args, name) for name in ADJUSTABLE})
    with contextlib.closing(_open_backend(args)) as backend:
        terminal = Terminal()
        chat = Chat(backend, sampling, terminal, args.system)
        if args.prompt is not None:
            return 0 if chat.say(sys.stdin.read() if args.prompt == "-" else args.prompt) else 1
        terminal.note(f"{backend.name} · /help lists the commands")
        return chat.loop()


class Backend(Protocol):
    """Who answers: a server, or a model in this process."""

    name: str
    tokens: int  # of the last response

    def answer(self, messages: list[Message], sampling: SamplingParams) -> Iterator[str]:
        """Yields text as it comes; closing the iterator stops the response."""

    def close(self) -> None: ...


def _open_backend(args: argparse.Namespace) -> Backend:
    tls = tls_context(args.ca, args.insecure)
    if args.url:
        server = RemoteServer(args.url, args.model, args.api_key, tls)
        if not server.answers():
            server.close()
            raise UnavailableError(f"no server answers at {args.url}")
        return server
    if not args.model_path:
        server = RemoteServer(DEFAULT_URL, args.model, args.api_key, tls)
        if server.answers():
            return server
        server.close()
        if args.model != "default":
            raise ConfigError(f"--model needs a server, and none answers at {DEFAULT_URL}: give --url or --model-path")
    return InProcess(args.model_path)


class RemoteServer:
    def __init__(self, url: str, model: str, api_key: str | None, tls: ssl.SSLContext | None = None) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        try:
            timeout = httpx.Timeout(600, connect=5)
            self.http = httpx.Client(base_url=base, headers=headers, timeout=timeout, verify=tls or True)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url!r} is not a URL: {error}") from None
        self.model = model
        self.name = f"{model} at {url}"
        self.tokens = 0

    def answers(self) -> bool:
        import httpx

        try:
            return self.http.get("/v1/models", timeout=5).status_code < 500
        except (httpx.TransportError, httpx.UnsupportedProtocol):
            return False

    def answer(self, messages: list[Message], sampling: SamplingParams) -> Iterator[str]:
        import httpx

        self.tokens = 0
        try:
            with self.http.stream("POST", "/v1/chat/completions", json=self._body(messages, sampling)) as response:
                if response.status_code != 200:
                    raise ParallmError(_error_message(response.read().decode(errors="replace")))
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield from self._text(json.loads(line[6:]))
        except httpx.TransportError as error:
            raise UnavailableError(f"the server went away: {error}") from None

    def _body(self, messages: list[Message], sampling: SamplingParams) -> dict[str, Any]:
        """Options left at their defaults are not sent, for servers that do not know them."""
        defaults = SamplingParams()
        options = {
            name: getattr(sampling, name) for name in ADJUSTABLE if getattr(sampling, name) != getattr(defaults, name)
        }
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, "messages": messages, **stream, **options}

    def _text(self, chunk: dict[str, Any]) -> Iterator[str]:
        if "error" in chunk:
            raise ParallmError(_error_message(json.dumps(chunk)))
        if usage := chunk.get("usage"):
            self.tokens = usage["completion_tokens"]
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if text := delta.get("reasoning_content") or delta.get("content"):
                yield text

    def close(self) -> None:
        self.http.close()


def _error_message(body: str) -> str:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return body[:500]
    return str(error["message"]) if isinstance(error, dict) else str(error)


class InProcess:
    def __init__(self, path: str | None) -> None:
        from mlx_parallm.llm import LLM

        self.llm = LLM(path, max_batch_size=1)
        self.name = self.llm.name
        self.tokens = 0

    def answer(self, messages: list[Message], sampling: SamplingParams) -> Iterator[str]:
        self.tokens = 0
        for piece in self.llm.stream_chat(messages, sampling):
            self.tokens += len(piece.token_ids)
            yield piece.text

    def close(self) -> None:
        self.llm.close()


class Terminal:
    """Reads messages and writes answers; plain on a pipe, with a prompt, history and dim notes on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.notes = Console(stderr=True, highlight=False, soft_wrap=True)
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() line editing and history)

    def note(self, text: str) -> None:
        self.notes.print(text, style="dim", markup=False)

    def error(self, text: str) -> None:
        self.notes.print(f"error: {text}", style="red", markup=False)

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def read(self) -> str | None:
        """The next message, of one line or several; None at the end of input."""
        line = self._line("> ")
        if line is None:
            return None
        if line.startswith('"""'):
            return self._block(line[3:])
        while line.endswith("\\") and (more := self._line(". ")) is not None:
            line = line[:-1] + "\n" + more
        return line

    def _block(self, line: str | None) -> str:
        lines: list[str] = []
        while line is not None and not line.endswith('"""'):
            lines.append(line)
            line = self._line(". ")
        return "\n".join([*lines, line[:-3]] if line is not None else lines).strip("\n")

    def _line(self, prompt: str) -> str | None:
        try:
            return input(prompt if self.interactive else "")
        except EOFError:
            return None


class Chat:
    def __init__(self, backend: Backend, sampling: SamplingParams, terminal: Terminal, system: str | None) -> None:
        self.backend = backend
        self.sampling = sampling
        self.terminal = terminal
        self.system = system or ""
        self.turns: list[Message] = []

    def loop(self) -> int:
        """Chats until /exit or the end of input; on a pipe, a response that failed makes the exit code 1."""
        failed = False
        while True:
            try:
                message = self.terminal.read()
            except KeyboardInterrupt:
                self.terminal.note("\nCtrl-D or /exit leaves")
                continue
            if message is None or message.strip() == "/exit":
                return 1 if failed and not self.terminal.interactive else 0
            if message.startswith("/"):
                self.command(*message.partition(" ")[::2])
            elif message.strip():
                failed |= not self.say(message)

    def messages(self) -> list[Message]:
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def say(self, message: str) -> bool:
        """Asks and streams the response. A failed or empty one leaves no trace in the conversation."""
        self.turns.append({"role": "user", "content": message})
        watch = Stopwatch()
        text = ""
        try:
            with (
                watch.stopped_by_ctrl_c(),
                contextlib.closing(self.backend.answer(self.messages(), self.sampling)) as pieces,  # type: ignore[type-var]
            ):
                for piece in pieces:
                    if watch.interrupted:
                        break
                    watch.mark()
                    text += piece
                    self.terminal.write(piece)
        except KeyboardInterrupt:
            pass  # the watch knows
        except ParallmError as error:
            self.terminal.error(error.message)
            self.turns.pop()
            return False
        self.terminal.write("\n")
        self.terminal.note(watch.report(self.backend.tokens))
        self._remember(text)
        return True

    def _remember(self, text: str) -> None:
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def command(self, name: str, argument: str) -> None:
        argument = argument.strip()
        if name == "/reset":
            self.turns.clear()
            self.terminal.note("a new conversation")
        elif name == "/system":
            self.system = argument
            self.terminal.note("system prompt set" if argument else "no system prompt")
        elif name == "/save":
            self._save(argument)
        elif name == "/help":
            self.terminal.note(HELP)
        else:
            self.terminal.error(f"no command {name}; /help lists them")

    def _save(self, file: str) -> None:
        if not file:
            self.terminal.error("/save needs a file name")
            return
        try:
            Path(file).expanduser().write_text(json.dumps(self.messages(), indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            self.terminal.error(f"can't write {file}: {error.strerror}")
        else:
            self.terminal.note(f"saved to {file}")


class Stopwatch:
    """Times one response: until its first text, and from there to its last."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.first: float | None = None
        self.last = self.started
        self.pieces = 0
        self.interrupted = False

    @contextlib.contextmanager
    def stopped_by_ctrl_c(self) -> Iterator[None]:
        """Takes note of Ctrl-C: the exception alone may be lost in a library's clean-up."""

        def note(number: int, frame: Any) -> None:
            self.interrupted = True
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def mark(self) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.pieces += 1

    def report(self, tokens: int) -> str:
        if self.first is None:
            return "stopped" if self.interrupted else "an empty response"
        count = tokens or self.pieces  # a response that was stopped has no usage
        speed = f" · {(count - 1) / (self.last - self.first):.1f} tokens/s" if self.last > self.first else ""
        stopped = " · stopped" if self.interrupted else ""
        return f"{count} tokens{speed} · first after {(self.first - self.started) * 1000:.0f} ms{stopped}"
