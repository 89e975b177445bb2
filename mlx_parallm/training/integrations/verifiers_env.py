"""Environments of the package `verifiers` (0.1.14): `--task verifiers:NAME`, or `verifiers:NAME {"argument": …}`.

The package plays its own rollouts with a client that asks a model. Here that client hands the conversation to the loop
and waits until the policy has answered, so an environment keeps its own rules: setup, tools, stop conditions, rubric.
Rollouts run on an event loop of their own thread. A conversation may only grow, since a trajectory is one sequence.
"""

import asyncio
import json
import queue
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_parallm.errors import ConfigError, InvalidRequestError
from mlx_parallm.text.prompts import Message
from mlx_parallm.training.tasks.built_in import Problem
from mlx_parallm.training.tasks.environments import STEP_SECONDS, Environment, EnvironmentTask

INSTALL = "pip install 'mlx-parallm[verifiers]'"
MANY_TURNS = 32  # of an environment that names no limit


class VerifiersTask(EnvironmentTask):
    """The rows of an environment's dataset are the problems, those of its evaluation dataset are held out."""

    def __init__(self, target: str, max_tokens: int = 256) -> None:
        name, _, arguments = target.partition(" ")
        self.package = _package()
        self.environment = _load(self.package, name, arguments)
        learnt, held_out = _datasets(self.environment)
        self.rows = [*learnt, *held_out]
        self._learnt = len(learnt)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name=f"verifiers {name}", daemon=True).start()
        self.answer_tokens = max_tokens
        super().__init__(f"verifiers:{name}", lambda: VerifiersEpisode(self))

    def problem(self, random: random.Random, level: int) -> Problem:
        return self._problem(random.randrange(self._learnt))

    def held_out(self) -> Sequence[Problem] | None:
        return [self._problem(row) for row in range(self._learnt, len(self.rows))] or None

    def _problem(self, row: int) -> Problem:
        prompt = self.rows[row].get("prompt") or ""
        messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [_opened(one) for one in prompt]
        )
        return Problem(tuple(messages), {"seed": row, "level": 1})


class VerifiersEpisode(Environment):
    """A rollout of the package. `_asked` has what it wants next: a completion, or that its reward be taken."""

    def __init__(self, task: VerifiersTask) -> None:
        super().__init__()
        turns = getattr(task.environment, "max_turns", -1)
        self.max_turns = turns if turns > 0 else MANY_TURNS
        self.max_tokens = task.answer_tokens
        self._task = task
        self._asked: queue.Queue[_Turn | _End] = queue.Queue()
        self._messages: list[Message] = []
        self._turn: _Turn | _End | None = None

    def reset(self, seed: int, level: int = 1) -> list[Message]:
        asyncio.run_coroutine_threadsafe(self._play(self._task.rows[seed]), self._task.loop)
        self._turn = turn = self._next()
        if isinstance(turn, _End):
            raise turn.error or InvalidRequestError(
                f"{self._task.name} has ended an episode before the first completion"
            )
        self._messages = turn.messages
        self.tools = turn.tools
        return self._messages

    def step(self, messages: list[Message]) -> tuple[list[Message], float, bool]:
        known = len(self._messages) + 1  # with the completion
        self._reply(messages[-1])
        self._turn = turn = self._next()
        if isinstance(turn, _End):
            return [], self._take(turn), True
        before = self._messages
        self._messages = turn.messages
        if turn.messages[: known - 1] != before or len(turn.messages) <= known:
            raise InvalidRequestError(f"{self._task.name} rewrites its conversation: it can't be one trajectory")
        return self._messages[known:], 0.0, False

    def cut_off(self) -> float:
        """The package scores a conversation that has no more room, as it does with its own clients."""
        if not isinstance(self._turn, _Turn):
            return 0.0
        self._reply(None)
        ended = self._next()
        return self._take(ended) if isinstance(ended, _End) else 0.0

    def _reply(self, answer: Message | None) -> None:
        turn = self._turn
        assert isinstance(turn, _Turn)
        self._task.loop.call_soon_threadsafe(turn.reply, answer)

    def _next(self) -> "_Turn | _End":
        try:
            return self._asked.get(timeout=STEP_SECONDS)
        except queue.Empty:
            raise TimeoutError(f"{self._task.name} took more than {STEP_SECONDS:.0f} s") from None

    def _take(self, ended: "_End") -> float:
        if ended.error is not None:
            raise ended.error
        self.metrics |= ended.metrics
        return ended.reward

    async def _play(self, row: Mapping[str, Any]) -> None:
        """Plays an episode, on the thread of the package's rollouts."""
        environment = self._task.environment
        try:
            client = _client(self._task.package, self._asked.put)
            state = await environment.rollout(dict(row), client, "policy", {})
            if state.get("error") is not None:
                raise state["error"]
            await environment.rubric.score_rollout(state)
            await environment.rubric.cleanup(state)
            metrics = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
            self._asked.put(_End(float(state["reward"]), metrics))
        except Exception as error:
            self._asked.put(_End(0.0, {}, error))


class _Turn:
    """The conversation so far, which waits for a completion."""

    def __init__(self, messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        self.messages = messages
        self.tools = tools
        self.answer: asyncio.Future[Message | None] = asyncio.get_running_loop().create_future()

    def reply(self, answer: Message | None) -> None:
        """None: there is no room for one."""
        if not self.answer.done():
            self.answer.set_result(answer)


class _End:
    def __init__(self, reward: float, metrics: Mapping[str, float], error: Exception | None = None) -> None:
        self.reward = reward
        self.metrics = metrics
        self.error = error


def _client(package: Any, ask: Callable[[_Turn], None]) -> Any:
    """A client of the package that asks the policy."""

    class PolicyClient(package.Client):  # type: ignore[misc]
        def setup_client(self, config: Any) -> None:
            raise ConfigError("the policy is asked in this process: it needs no configuration of a client")

        async def to_native_tool(self, tool: Any) -> dict[str, Any]:
            facts = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            return {"type": "function", "function": facts}

        async def to_native_prompt(self, messages: Any) -> tuple[list[Message], dict[str, Any]]:
            return [_opened(one.model_dump(exclude_none=True)) for one in messages], {}

        async def get_native_response(
            self, prompt: list[Message], model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Message:
            turn = _Turn(prompt, tools or ())
            ask(turn)
            answer = await turn.answer
            if answer is None:
                raise package.OverlongPromptError
            return answer

        async def raise_from_native_response(self, response: Message) -> None:
            return None  # a completion that could not be had never comes here

        async def from_native_response(self, response: Message) -> Any:
            return _response(package, response)

        async def close(self) -> None:
            return None  # nothing is held open

    return PolicyClient(None)


def _response(package: Any, answer: Message) -> Any:
    calls = [
        {"id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in answer.get("tool_calls", ())
    ]
    cut_off = answer.get("finish_reason") == "length"
    ended = "tool_calls" if calls else "stop"
    return package.Response.model_validate(
        {
            "id": uuid.uuid4().hex,
            "created": int(time.time()),
            "model": "policy",
            "message": {
                "role": "assistant",
                "content": answer["content"],
                "tool_calls": calls or None,
                "finish_reason": "length" if cut_off else ended,
                "is_truncated": cut_off,
            },
        }
    )


def _opened(message: Mapping[str, Any]) -> Message:
    """A message of the package in OpenAI's form, with text alone."""
    opened: Message = {"role": message["role"], "content": _text(message.get("content") or "")}
    if calls := message.get("tool_calls"):
        opened["tool_calls"] = [
            {"id": one["id"], "type": "function", "function": {"name": one["name"], "arguments": one["arguments"]}}
            for one in calls
        ]
    if "tool_call_id" in message:
        opened["tool_call_id"] = message["tool_call_id"]
    return opened


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if any(part.get("type") != "text" for part in content):
        raise InvalidRequestError("only text of verifiers environments can be learnt from, not images or audio")
    return "".join(part["text"] for part in content)


def _package() -> Any:
    try:
        import verifiers
    except ImportError as error:
        raise ConfigError(f"verifiers is not installed: {INSTALL}") from error
    if not hasattr(verifiers, "MultiTurnEnv") or not hasattr(verifiers, "Client"):
        version = getattr(verifiers, "__version__", "of an unknown version")
        raise ConfigError(
            f"verifiers {version} has no environments of the kind that are known here (0.1.14): {INSTALL}"
        )
    return verifiers


def _load(package: Any, name: str, arguments: str) -> Any:
    try:
        environment = package.load_environment(name, **(json.loads(arguments) if arguments.strip() else {}))
    except Exception as error:  # the environment's own
        raise ConfigError(f"verifiers has no environment {name!r} that can be loaded: {error}") from error
    if not isinstance(environment, package.MultiTurnEnv):
        raise ConfigError(f"{name} is a {type(environment).__name__}; only kinds of MultiTurnEnv can be learnt from")
    if environment.rubric.has_group_rewards:
        raise ConfigError(
            f"the rubric of {name} compares the completions of a group; rewards must be of single episodes"
        )
    return environment


def _datasets(environment: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to learn from, and held-out ones where there is a dataset for evaluation."""
    learnt = environment.build_dataset()
    held_out = environment.build_eval_dataset()
    if learnt is None:
        raise ConfigError("the environment has no dataset to learn from")
    return learnt.to_list(), [] if held_out is None else held_out.to_list()
