"""Environments of the package verifiers on a real engine. Needs `pip install 'mlx-parallm[verifiers]'`."""

import importlib.util
import random
import sys
import types
from typing import Any

import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.training.integrations.verifiers_env import MANY_TURNS, VerifiersEpisode, VerifiersTask
from mlx_parallm.training.tasks.built_in import Task
from mlx_parallm.training.tasks.environments import EpisodeSampler
from mlx_parallm.training.tasks.find_task import find_task
from tests.engine.test_session import school

INSTALLED = importlib.util.find_spec("verifiers") is not None
needs_verifiers = pytest.mark.skipif(not INSTALLED, reason="verifiers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the package and what it imports
ROWS = [{"question": f"what is {number}?", "answer": str(number)} for number in range(20)]


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


def _environment(kind: str = "single") -> Any:
    import verifiers as vf
    from datasets import Dataset

    learnt, held_out = Dataset.from_list(ROWS[:16]), Dataset.from_list(ROWS[16:])

    async def letters(completion: Any, answer: str) -> float:
        return float(len(completion)) + float(answer) / 100

    async def compared(completions: Any) -> list[float]:
        return [0.0 for _ in completions]

    class Echo(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [{"role": "user", "content": f"turn {len(state['trajectory'])} of {state['answer']}"}]

    class Rewriting(Echo):
        async def get_prompt_messages(self, state: Any) -> Any:
            turns = len(state["trajectory"])
            return [
                vf.UserMessage(content=f"all new {turns}"),
                vf.UserMessage(content="twice"),
                vf.UserMessage(content="x"),
            ]

    class Failing(Echo):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            raise vf.ToolCallError("the sandbox is gone")

    given: dict[str, Any] = {"dataset": learnt, "eval_dataset": held_out, "system_prompt": "Be brief."}
    rubric = vf.Rubric(funcs=[compared if kind == "group" else letters])
    if kind in ("single", "group"):
        return vf.SingleTurnEnv(rubric=rubric, **given)
    if kind == "tools":
        return vf.ToolEnv(tools=[add], max_turns=3, rubric=rubric, **given)
    made = {"echo": Echo, "rewriting": Rewriting, "failing": Failing}[kind]
    return made(max_turns=3, rubric=rubric, **given)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that is installed as packages of environments are: a module with `load_environment`."""
    module = types.ModuleType("parallm_example")
    module.load_environment = _environment  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "parallm_example", module)


def task(kind: str) -> Task:
    return find_task(f'verifiers:parallm-example {{"kind": "{kind}"}}')


def problems(one: Task, *seeds: int) -> list[Any]:
    return [one.problem(random.Random(seed), 1) for seed in seeds]


@needs_verifiers
@pytest.mark.parametrize(("kind", "turns"), [("single", 1), ("echo", 3), ("tools", 1)])
def test_episodes_are_scored_by_the_environments_rubric(named: None, kind: str, turns: int) -> None:
    one = task(kind)
    with school() as given:
        given.session()
        plays = EpisodeSampler(given.engine, given.rollouts, one)  # type: ignore[arg-type]
        asked = problems(one, 1, 2)
        sampling = SamplingParams(temperature=1.0, max_tokens=4, n=2, ignore_eos=True)
        groups = plays.sample(asked, sampling, "policy", 7, "salt")
        for problem, group in zip(asked, groups, strict=True):
            said = 2 * turns - 1
            worth = said + float(ROWS[problem.metadata["seed"]]["answer"]) / 100
            for answer in group:
                assert answer.score == pytest.approx(worth)
                assert answer.parts["num_turns"] == turns
                assert answer.record.mask is not None
                assert sum(answer.record.mask) == 4 * turns
        assert plays.failures == 0
        given.driver.settle()


@needs_verifiers
def test_an_environments_evaluation_dataset_is_held_out(named: None) -> None:
    one = task("single")
    held_out = one.held_out()
    assert held_out is not None
    assert [problem.messages[-1]["content"] for problem in held_out] == [row["question"] for row in ROWS[16:]]
    drawn = {problem.metadata["seed"] for problem in problems(one, *range(200))}
    assert drawn == set(range(16))


@needs_verifiers
def test_tools_are_offered_called_and_answered(named: None) -> None:
    one = task("tools")
    assert isinstance(one, VerifiersTask)
    episode = VerifiersEpisode(one)
    messages = episode.reset(3)
    assert [message["content"] for message in messages] == ["Be brief.", "what is 3?"]
    assert episode.tools[0]["function"]["name"] == "add"
    function = {"name": "add", "arguments": '{"a": 2, "b": 5}'}
    call = {"id": "c1", "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call], "finish_reason": "stop"}
    said, reward, done = episode.step([*messages, answer])
    assert (said, reward, done) == ([{"role": "tool", "content": "7", "tool_call_id": "c1"}], 0.0, False)
    last = {"role": "assistant", "content": "7", "finish_reason": "stop"}
    said, reward, done = episode.step([*messages, answer, *said, last])
    assert (said, reward, done) == ([], 3.03, True)
    assert episode.metrics["add_calls"] == 1
    assert episode.cut_off() == 0.0


@needs_verifiers
def test_an_episode_without_room_is_scored_as_it_is(named: None) -> None:
    one = task("echo")
    assert isinstance(one, VerifiersTask)
    episode = VerifiersEpisode(one)
    messages = episode.reset(3)
    said, _, done = episode.step([*messages, {"role": "assistant", "content": "a", "finish_reason": "length"}])
    assert ([one["content"] for one in said], done) == (["turn 1 of 3"], False)
    assert episode.cut_off() == 1.03


@needs_verifiers
@pytest.mark.parametrize(("kind", "why"), [("failing", "sandbox is gone"), ("rewriting", "rewrites its conversation")])
def test_what_an_environment_can_not_do_costs_its_episodes(
    named: None, kind: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = task(kind)
    with school() as given:
        given.session()
        plays = EpisodeSampler(given.engine, given.rollouts, one)  # type: ignore[arg-type]
        sampling = SamplingParams(temperature=1.0, max_tokens=4, n=2, ignore_eos=True)
        (group,) = plays.sample(problems(one, 1), sampling, "policy", 7, "salt")
        assert [answer.score for answer in group] == [None, None]
        assert why in caplog.text
        given.driver.settle()


@needs_verifiers
def test_environments_that_can_not_be_learnt_from_are_named(named: None) -> None:
    with pytest.raises(ConfigError, match="compares the answers of a group"):
        task("group")
    with pytest.raises(ConfigError, match="no environment 'nothing-here'"):
        find_task("verifiers:nothing-here")
    with pytest.raises(ConfigError, match="can be loaded"):
        find_task("verifiers:parallm-example {bad json")


@pytest.mark.parametrize(
    ("stated", "turns"), [({"max_turns": 7}, 7), ({"max_turns": -1}, MANY_TURNS), ({}, MANY_TURNS)]
)
def test_an_episode_has_as_many_turns_as_its_environment_allows(stated: dict[str, int], turns: int) -> None:
    task: Any = types.SimpleNamespace(environment=types.SimpleNamespace(**stated), answer_tokens=5)
    episode = VerifiersEpisode(task)
    assert (episode.max_turns, episode.max_tokens) == (turns, 5)


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"pip install 'mlx-parallm\[verifiers\]'"):
        find_task("verifiers:wordle")
    monkeypatch.setitem(sys.modules, "verifiers", types.ModuleType("verifiers"))
    with pytest.raises(ConfigError, match="of the kind that are known here"):
        find_task("verifiers:wordle")
