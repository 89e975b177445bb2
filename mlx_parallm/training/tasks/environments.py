"""Environments: conversations of several turns, with tools, that a policy learns from as a whole.

An environment is a class with `reset` and `step`; an episode is one object of it. The model answers, `step` adds what
tools or users say to that, and so on until the episode is done. All of it is one trajectory: what the model sampled is
learnt from, what others wrote is not. A turn's prompt is the very tokens of the turns before, never text that was
tokenised anew, so log-probabilities are those of the sampler and the prefix cache finds every turn.

An environment is named as a task: `--task calculator`, `--task file.py:MyEnvironment`.
"""

import ast
import logging
import operator
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.policy_spans import PolicySpan
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.text.detokenize import Vocabulary
from mlx_parallm.text.parsers.calls import Piece
from mlx_parallm.text.parsers.chat_parser import Thinking, chat_parser
from mlx_parallm.text.parsers.tool_format import ToolFormat
from mlx_parallm.text.prompts import Conversation, Message, Prompts
from mlx_parallm.training.rl.records import Record
from mlx_parallm.training.rl.rollouts import RolloutSource
from mlx_parallm.training.rl.task_loop import ScoredCompletion, TaskSampler
from mlx_parallm.training.tasks.built_in import Problem, Task
from mlx_parallm.training.tasks.components import Component
from mlx_parallm.training.tasks.scorers import Rewards

log = logging.getLogger(__name__)

STEP_SECONDS = 60.0  # that a step of an environment may take
STEPS_AT_ONCE = 8
MARK = "\x02the answer\x03"  # stands for a completion in a rendered conversation


class Environment(ABC):
    """One episode. `tools` are offered to the model, as OpenAI's API describes them."""

    tools: Sequence[Mapping[str, Any]] = ()
    max_turns = 4  # completions of the model
    max_tokens = 64  # of each
    levels = 1  # of difficulty

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}  # of the episode, for the log: success, number of calls, …

    @abstractmethod
    def reset(self, seed: int, level: int = 1) -> list[Message]:
        """The messages that the episode begins with; the same for the same seed and level."""

    @abstractmethod
    def step(self, messages: list[Message]) -> tuple[list[Message], float, bool]:
        """Returns what is said to the newest message, the model's; what that was worth; whether the episode is done.

        The newest message has `content`, `tool_calls` where the model called tools, and `finish_reason`.
        """

    def cut_off(self) -> float:
        """Called where the episode ends otherwise: no turns or no room left, or it failed. What it is still worth."""
        return 0.0


class EnvironmentTask(Task):
    """An environment as a task: its problems are seeds."""

    def __init__(self, name: str, make: Callable[[], Environment]) -> None:
        self.name = name
        self.make = make
        self.max_tokens = make().max_tokens
        self.levels = make().levels

    def problem(self, random: random.Random, level: int) -> Problem:
        seed = random.getrandbits(31)
        return Problem(tuple(self.make().reset(seed, level)), {"seed": seed, "level": level})

    def score(self, completion: str, metadata: Mapping[str, Any]) -> float:
        raise InvalidRequestError(f"{self.name} is an environment: it scores whole episodes, not completions")


@dataclass(slots=True)
class Episode:
    """A conversation on its way."""

    environment: Environment
    messages: list[Message]
    prompt: list[int]  # tokens before the first completion
    group: int
    tokens: list[int] = field(default_factory=list)  # behind the prompt, whoever wrote them
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    spans: list[PolicySpan] = field(default_factory=list)
    ends: int = 0  # tokens up to the end of what the model said last
    records: list[Record] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    failed: bool = False

    def take(self, record: Record) -> None:
        """The model's completion."""
        begin = len(self.tokens)
        self.ends = begin + len(record.completion_ids)
        self.spans += [span.shifted(begin) for span in record.spans]
        self.tokens += record.completion_ids
        self.logprobs += record.logprobs
        self.mask += record.mask or [True] * len(record.completion_ids)
        self.records.append(record)

    def add(self, tokens: Sequence[int]) -> None:
        """What others wrote."""
        begin = len(self.tokens)
        version = self.spans[-1].version if self.spans else 0
        self.spans.append(PolicySpan(first=begin, end=begin + len(tokens), version=version))
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.mask += [False] * len(tokens)

    def record(self) -> Record:
        """All of it as one completion to its prompt; it ends with what the model said last."""
        last = self.records[-1]
        end = self.ends
        return replace(
            self.records[0],
            completion_ids=tuple(self.tokens[:end]),
            logprobs=tuple(self.logprobs[:end]),
            spans=tuple(span for span in self.spans if span.end <= end),
            mask=tuple(self.mask[:end]),
            finish_reason=last.finish_reason,
            max_tokens=None,
        )


def make_task_sampler(
    engine: Engine, rollouts: RolloutSource, rewards: Rewards, task: Task, components: Sequence[Component] = ()
) -> TaskSampler:
    """Returns what puts a task's problems to a policy: episodes for an environment, single answers for all others."""
    if isinstance(task, EnvironmentTask):
        return EpisodeSampler(engine, rollouts, task)
    return TaskSampler(engine, rollouts, rewards, task, components)


class EpisodeSampler(TaskSampler):
    """Plays episodes with a policy, all of a step's side by side, turn by turn."""

    def __init__(self, engine: Engine, rollouts: RolloutSource, task: EnvironmentTask) -> None:
        self.task: Task = task
        self._make = task.make
        self.failures = 0  # episodes whose environment failed
        self._engine = engine
        self._rollouts = rollouts
        tokenizer = engine.model.tokenizer
        self._prompts = Prompts(tokenizer)
        self._vocabulary = Vocabulary(tokenizer)
        self._format = ToolFormat.of(tokenizer)
        self._thinking = Thinking.of(tokenizer)
        self._drop = tokenizer.structural_markers

    def text(self, record: Record) -> str:
        return self._vocabulary.decode(record.completion_ids, skip_special=True)

    def sample(
        self, problems: Sequence[Problem], sampling: SamplingParams, adapter: str | None, seed: int | None, salt: str
    ) -> list[list[ScoredCompletion]]:
        """Plays `sampling.n` episodes of each problem; returns them with scores, None where the environment failed."""
        single = replace(sampling, n=1)
        with ThreadPoolExecutor(STEPS_AT_ONCE, thread_name_prefix="environment") as pool:
            groups = [group for group in range(len(problems)) for _ in range(sampling.n)]
            begun = list(pool.map(lambda group: self._begin(problems[group], group), groups))
            if not (episodes := [episode for episode in begun if episode is not None]):
                raise InvalidRequestError(f"no episode of {self.task.name} could begin: the log says why")
            for turn in range(max(episode.environment.max_turns for episode in episodes)):
                active = [one for one in episodes if not one.done and self._has_room(one, single.max_tokens or 1)]
                if not active:
                    break
                sampled = self._rollouts.sample(
                    [[*one.prompt, *one.tokens] for one in active],
                    single,
                    adapter=adapter,
                    seed=None if seed is None else seed + turn * len(episodes),
                    salt=salt,
                )
                for episode, (record,) in zip(active, sampled, strict=True):
                    episode.take(record)
                for episode, stepped in [(one, pool.submit(self._step, one)) for one in active]:
                    self._wait(episode, stepped)
            for episode, stepped in [(one, pool.submit(self._cut_off, one)) for one in episodes]:
                self._wait(episode, stepped)
        completions: list[list[ScoredCompletion]] = [[] for _ in problems]
        for episode in episodes:
            if not episode.records:  # there was no room for a completion
                self._lose(InvalidRequestError(f"its {len(episode.prompt)} tokens leave no room for a completion"))
                continue
            reward = None if episode.failed else episode.reward
            completions[episode.group].append(
                ScoredCompletion(record=episode.record(), score=reward, parts=dict(episode.environment.metrics))
            )
        return completions

    def _begin(self, problem: Problem, group: int) -> Episode | None:
        """None where the environment fails."""
        environment = self._make()
        try:
            messages = environment.reset(int(problem.metadata["seed"]), int(problem.metadata["level"]))
        except Exception as error:  # the environment's own
            self._lose(error)
            return None
        conversation = Conversation([dict(message) for message in messages], self._tools(environment))
        prompt = self._prompts.chat(conversation).tokens
        return Episode(environment=environment, messages=list(messages), prompt=prompt, group=group)

    def _has_room(self, episode: Episode, tokens: int) -> bool:
        turns = len(episode.records)
        length = len(episode.prompt) + len(episode.tokens) + tokens
        return turns < episode.environment.max_turns and length <= self._engine.model.context_length

    def _wait(self, episode: Episode, stepped: Any) -> None:
        try:
            stepped.result(STEP_SECONDS)
        except Exception as error:  # the environment's own, or it takes too long
            self._fail(episode, error)

    def _cut_off(self, episode: Episode) -> None:
        if episode.failed or not episode.done:
            episode.reward += float(episode.environment.cut_off())

    def _fail(self, episode: Episode, error: Exception) -> None:
        if not episode.failed:  # an episode that fails again while it is cut off is lost once
            self._lose(error)
        episode.done = episode.failed = True

    def _lose(self, error: Exception) -> None:
        self.failures += 1
        log.warning("an episode of %s is given up: %s: %s", self.task.name, type(error).__name__, error)

    def _step(self, episode: Episode) -> None:
        record = episode.records[-1]
        message = self._message(episode, record)
        episode.messages.append(message)
        said, reward, done = episode.environment.step(list(episode.messages))
        episode.reward += float(reward)
        episode.done = bool(done) or not said
        if not episode.done:
            episode.add(self._behind(episode, said, record))
            episode.messages += said

    def _message(self, episode: Episode, record: Record) -> Message:
        """The model's completion as a message: its text, and the calls in it."""
        tools = self._tools(episode.environment)
        ended = record.finish_reason == "stop"
        text = self._vocabulary.decode(record.completion_ids, skip_special=not tools)
        parser = chat_parser(self._format, thinking=self._thinking, tools=tools, drop=self._drop)
        if parser is None:
            return {"role": "assistant", "content": text.strip(), "finish_reason": record.finish_reason}
        pieces = [parser.push(text), parser.finish(cut_off=not ended)]
        message: Message = {
            "role": "assistant",
            "content": "".join(piece.content for piece in pieces).strip(),
            "finish_reason": record.finish_reason,
        }
        if calls := _calls(pieces):
            message["tool_calls"] = calls
        return message

    def _behind(self, episode: Episode, said: Sequence[Message], record: Record) -> list[int]:
        """The tokens between a completion and the next: the end of its turn, what others say, and the next one's
        head."""
        before = [_plain(message) for message in episode.messages[:-1]]
        marked: Message = {"role": "assistant", "content": MARK}
        conversation = Conversation(
            [*before, marked, *(_plain(message) for message in said)], self._tools(episode.environment)
        )
        _, mark, text = self._prompts.render(conversation).rpartition(MARK)
        if not mark:
            raise InvalidRequestError("the chat template does not show the model's completions, so it can't take turns")
        last = self._vocabulary.text(record.completion_ids[-1])
        if record.completion_ids[-1] in self._engine.model.eos_token_ids:  # the model has ended its turn itself
            text = text.lstrip().removeprefix(last)
        return self._prompts.encode(text, add_special_tokens=False)

    def _tools(self, environment: Environment) -> list[dict[str, Any]]:
        return [dict(tool) for tool in environment.tools]


def _plain(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "finish_reason"}


def _calls(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for call in (call for piece in pieces for call in piece.calls):
        if call.name is not None:
            function = {"name": call.name, "arguments": ""}
            calls.append({"id": call.id, "type": "function", "function": function})
        calls[-1]["function"]["arguments"] += call.arguments
    return calls


# The example: sums too long for a small model's head, and a calculator.

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
CALL = re.compile(r"calc\(([^()]{1,60})\)", re.IGNORECASE)
NUMBER = re.compile(r"-?\d[\d,]*")


def evaluate(expression: str) -> int | None:
    """Evaluates an expression of whole numbers with +, - and *; None where it is anything else, or the result huge."""
    try:
        return _value(ast.parse(expression.strip().replace("×", "*"), mode="eval").body)
    except (SyntaxError, ValueError, KeyError, RecursionError):
        return None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**12:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp):
        return int(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("not a sum")


class Calculator(Environment):
    """Sums of three-digit numbers. The model may write `calc(…)`, is told the result, and answers with it.

    The reward is 1 for a completion whose first number is the right one and that calls nothing. The embedded model
    copies the call from the example and calls again instead of answering, so it has to learn when not to. A reward for
    the call itself teaches it the opposite.
    """

    max_turns = 2
    max_tokens = 16

    def reset(self, seed: int, level: int = 1) -> list[Message]:
        chance = random.Random(seed)
        self.metrics["call"] = self.metrics["success"] = 0.0
        self.numbers = [chance.randint(100, 999) for _ in range(2)]
        return [
            {"role": "system", "content": "Use the calculator."},
            {"role": "user", "content": "What is 12 + 30?"},
            {"role": "assistant", "content": "calc(12 + 30)"},
            {"role": "user", "content": f"What is {self.numbers[0]} + {self.numbers[1]}?"},
        ]

    def step(self, messages: list[Message]) -> tuple[list[Message], float, bool]:
        content = messages[-1]["content"]
        right = sum(self.numbers)
        if not self.metrics["call"] and (call := CALL.search(content)) is not None:
            result = evaluate(call[1])
            self.metrics["call"] = 1.0
            said = "That is no sum." if result is None else f"The calculator says {result}."
            return [{"role": "user", "content": said}], 0.0, False
        number = NUMBER.search(content)
        answered = number is not None and number[0].replace(",", "") == str(right) and "(" not in content
        self.metrics["success"] = float(answered)
        return [], float(answered), True


BUILT_IN: dict[str, type[Environment]] = {"calculator": Calculator}
