"""`parallm connect` prints what a client needs to use a running server; `parallm launch` starts one with it set."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from mlx_parallm.cli.remote_commands import Remote, add_server_flags
from mlx_parallm.errors import ConfigError, ParallmError

NO_KEY = "none"  # clients refuse to start without one


@dataclass(frozen=True, slots=True)
class Connection:
    """A server, as clients are told of it."""

    url: str
    key: str
    model: str

    @property
    def openai(self) -> str:
        return f"{self.url}/v1"


def add_connect_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("client", nargs="?", choices=[*SETTINGS, "all"], default="all", help="default: all of them")
    _add_flags(parser)


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("agent", choices=list(AGENTS), help="the program to start; it gets what stands after --")
    parser.set_defaults(passed_on=())
    _add_flags(parser)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_server_flags(parser)
    parser.add_argument("--model", help="the model to name (default: the server's first that chats)")


def connect(args: argparse.Namespace) -> int:
    found = _connection(args)
    names = list(SETTINGS) if args.client == "all" else [args.client]
    for name in names:
        title, text = SETTINGS[name](found)
        sys.stdout.write(f"# {title}\n{text.rstrip()}\n\n")
    return 0


def launch(args: argparse.Namespace) -> int:
    found = _connection(args)
    program = shutil.which(AGENTS[args.agent])
    if program is None:
        raise ConfigError(f"{AGENTS[args.agent]} is not on the PATH: install {args.agent} first")
    arguments = [*_arguments(args.agent, found), *args.passed_on]
    return subprocess.run([program, *arguments], env=os.environ | environment(args.agent, found)).returncode


def _connection(args: argparse.Namespace) -> Connection:
    with closing(Remote.of(args)) as remote:
        models = remote.get("/v1/models")["data"]
    chats = [one["id"] for one in models if one["kind"] in ("chat", "vision")]
    if args.model is not None and args.model not in [one["id"] for one in models]:
        raise ConfigError(
            f"{remote.url} serves no model {args.model!r}; there is {', '.join(one['id'] for one in models)}"
        )
    if args.model is None and not chats:
        raise ParallmError(f"{remote.url} serves no model that chats; name another with --model")
    return Connection(remote.url, remote.key or NO_KEY, args.model or chats[0])


def environment(agent: str, found: Connection) -> dict[str, str]:
    """The variables that an agent reads."""
    if agent == "claude-code":
        return {
            "ANTHROPIC_BASE_URL": found.url,
            "ANTHROPIC_AUTH_TOKEN": found.key,
            "ANTHROPIC_MODEL": found.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": found.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
    if agent == "ollama":
        return {"OLLAMA_HOST": found.url}
    return {"OPENAI_BASE_URL": found.openai, "OPENAI_API_KEY": found.key, "OPENAI_MODEL": found.model}


def _arguments(agent: str, found: Connection) -> list[str]:
    if agent != "codex":
        return ["--model", f"openai/{found.model}"] if agent == "aider" else []
    options = {
        "model": found.model,
        "model_provider": "parallm",
        "model_providers.parallm.name": "MLX ParaLLM",
        "model_providers.parallm.base_url": found.openai,
        "model_providers.parallm.env_key": "OPENAI_API_KEY",
        "model_providers.parallm.wire_api": "responses",
    }
    return [part for name, value in options.items() for part in ("-c", f"{name}={json.dumps(value)}")]


def _exports(variables: Mapping[str, str]) -> str:
    return "\n".join(f"export {name}={json.dumps(value)}" for name, value in variables.items())


def _openai(found: Connection) -> tuple[str, str]:
    return (
        "openai, Python",
        f"""from openai import OpenAI
client = OpenAI(base_url={found.openai!r}, api_key={found.key!r})
client.chat.completions.create(model={found.model!r}, messages=[{{"role": "user", "content": "Hello"}}])""",
    )


def _anthropic(found: Connection) -> tuple[str, str]:
    return (
        "anthropic, Python",
        f"""from anthropic import Anthropic
client = Anthropic(base_url={found.url!r}, api_key={found.key!r})
client.messages.create(model={found.model!r}, max_tokens=256, messages=[{{"role": "user", "content": "Hello"}}])""",
    )


def _ollama(found: Connection) -> tuple[str, str]:
    return (
        "ollama, Python",
        f"""from ollama import Client
client = Client(host={found.url!r}, headers={{"Authorization": {f"Bearer {found.key}"!r}}})
client.chat(model={found.model!r}, messages=[{{"role": "user", "content": "Hello"}}])""",
    )


def _langchain(found: Connection) -> tuple[str, str]:
    return (
        "LangChain",
        f"""from langchain_openai import ChatOpenAI
ChatOpenAI(model={found.model!r}, base_url={found.openai!r}, api_key={found.key!r}).invoke("Hello")""",
    )


def _claude_code(found: Connection) -> tuple[str, str]:
    return "Claude Code: then `claude`", _exports(environment("claude-code", found))


def _codex(found: Connection) -> tuple[str, str]:
    return (
        "Codex: in ~/.codex/config.toml, with the key in OPENAI_API_KEY",
        f"""model = {json.dumps(found.model)}
model_provider = "parallm"
[model_providers.parallm]
name = "MLX ParaLLM"
base_url = {json.dumps(found.openai)}
env_key = "OPENAI_API_KEY"
wire_api = "responses\"""",
    )


def _continue(found: Connection) -> tuple[str, str]:
    entry: dict[str, Any] = {"name": "MLX ParaLLM", "provider": "openai", "model": found.model}
    entry |= {"apiBase": found.openai, "apiKey": found.key}
    return "Continue (VS Code, JetBrains): in ~/.continue/config.json, under models", json.dumps(entry, indent=2)


def _zed(found: Connection) -> tuple[str, str]:
    model = {"name": found.model, "display_name": found.model, "max_tokens": 8192}
    providers = {"openai_compatible": {"MLX ParaLLM": {"api_url": found.openai, "available_models": [model]}}}
    return "Zed: in settings.json", json.dumps({"language_models": providers}, indent=2)


SETTINGS = {
    "openai": _openai,
    "anthropic": _anthropic,
    "ollama": _ollama,
    "langchain": _langchain,
    "claude-code": _claude_code,
    "codex": _codex,
    "continue": _continue,
    "zed": _zed,
}
AGENTS = {"claude-code": "claude", "codex": "codex", "aider": "aider", "ollama": "ollama"}
