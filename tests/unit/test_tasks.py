"""Tasks make problems by the random generator they are given and score exactly; scoring functions and their limits."""

import json
import random
import re
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config.training import BUILT_IN_SCORERS
from mlx_parallm.errors import ConfigError, InvalidRequestError
from mlx_parallm.training.tasks.built_in import SCORERS, TASKS, Rows
from mlx_parallm.training.tasks.environments import EnvironmentTask
from mlx_parallm.training.tasks.find_task import find_task
from mlx_parallm.training.tasks.scorers import MAX_HANGING, Item, Rewards, load_function


@pytest.mark.parametrize("name", list(TASKS))
def test_problems_are_a_function_of_the_seed(name: str) -> None:
    task = find_task(name)
    for level in range(1, task.levels + 1):
        first, again = ([task.problem(random.Random(seed), level) for seed in range(20)] for _ in range(2))
        assert first == again
        assert len({problem.messages[-1]["content"] for problem in first}) > 5


def test_arithmetic_answers_are_those_of_its_questions() -> None:
    task, forms = find_task("arithmetic"), set()
    for level in range(1, 5):
        for seed in range(40):
            problem = task.problem(random.Random(seed), level)
            numbers = re.fullmatch(r"(\d+) ([+-]) (\d+)(?: - (\d+))? =", problem.messages[-1]["content"])
            assert numbers is not None
            first, sign, second, third = numbers.groups()
            answer = int(first) + (int(second) if sign == "+" else -int(second)) - int(third or 0)
            assert problem.metadata["answer"] == answer
            assert task.score(f"{answer}", problem.metadata) == 1.0
            assert max(int(one) for one in (first, second, third or 0)) <= (9, 49, 99, 99)[level - 1]
            forms.add((level, sign, third is not None))
    assert forms == {(1, "+", False), (2, "+", False), (3, "+", False), (3, "-", False), (4, "+", True)}


@pytest.mark.parametrize(
    ("name", "completion", "facts", "score"),
    [
        ("arithmetic", "7", {"answer": 7}, 1.0),
        ("arithmetic", "3 + 4 = 7", {"answer": 7}, 1.0),
        ("arithmetic", "7 or 8", {"answer": 7}, 0.0),
        ("arithmetic", "seven", {"answer": 7}, 0.0),
        ("arithmetic", "-2", {"answer": -2}, 1.0),
        ("letters", "2 times", {"answer": 2}, 1.0),
        ("letters", "none", {"answer": 2}, 0.0),
        ("format", "<answer>corn</answer>", {}, 1.0),
        ("format", "It is <answer>corn</answer>", {}, 2 / 3),
        ("format", "<answer>corn", {}, 2 / 3),
        ("format", "corn</answer>", {}, 1 / 3),
        ("format", "corn", {}, 0.0),
        ("length", "one two three", {"words": 3}, 1.0),
        ("length", "one two three", {"words": 3, "finish_reason": "length"}, 0.0),
        ("length", "one two", {"words": 4}, 0.5),
        ("length", "a b c d e f g h i", {"words": 3}, 0.0),
    ],
)
def test_scores(name: str, completion: str, facts: dict[str, Any], score: float) -> None:
    assert TASKS[name].score(completion, facts) == pytest.approx(score)


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("It is 40, no, 42.", 42, 1.0),
        ("#### 1,200", "They have\n#### 1200", 1.0),
        ("42 of them, or 7", "42", 0.0),
        ("none", "42", 0.0),
    ],
)
def test_gsm8k_compares_last_numbers(completion: str, answer: Any, score: float) -> None:
    rewards = Rewards()
    rewards.check("gsm8k", {"answer": answer})
    assert rewards.score("gsm8k", [Item("", completion, {"answer": answer})]) == [score]


def test_scores_without_what_they_need_are_refused() -> None:
    def wants(prompts: Any, completions: Any, metadata: Any) -> list[float]:
        return [0.0 for _ in completions]

    wants.needs = ("topic",)  # type: ignore[attr-defined]
    rewards = Rewards({"wants": wants})
    for name, facts, word in (
        ("gsm8k", {}, "metadata.answer"),
        ("gsm8k", {"answer": "many"}, "a number in metadata.answer, not 'many'"),
        ("arithmetic", {"question": 1}, "metadata.answer"),
        ("length", {}, "metadata.words"),
        ("wants", {"answer": 1}, "metadata.topic"),
    ):
        with pytest.raises(InvalidRequestError, match=word) as error:
            rewards.check(name, {"answer": 1, "words": 2, "topic": ""}, facts)
        assert error.value.param == "metadata"
    rewards.check("format", {})
    assert sorted(SCORERS) == sorted(BUILT_IN_SCORERS)


def test_gsm8k_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "gsm8k.jsonl"
    file.write_text('{"question": "How many?", "answer": "Because.\\n#### 1,200"}\n')
    task = find_task(f"gsm8k:{file}")
    problem = task.problem(random.Random(0), 1)
    assert "How many?" in problem.messages[-1]["content"]
    assert task.score("so #### 1200", problem.metadata) == 1.0
    assert task.score("#### 12", problem.metadata) == 0.0
    with pytest.raises(ConfigError, match="no file of GSM8K"):
        find_task(f"gsm8k:{tmp_path / 'none'}")


def test_problems_of_reasoning_gym_are_those_of_a_seed_and_have_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a module that answers as the package does: what the package makes of it, this can't say."""

    class Dataset(list[dict[str, Any]]):
        def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
            return 1.0 if answer == entry["answer"] else 0.01

    def create_dataset(name: str, size: int, seed: int) -> Dataset:
        if name != "sums":
            raise ValueError(f"Dataset '{name}' not registered")
        return Dataset({"question": f"What is {seed} + {place}?", "answer": str(seed + place)} for place in range(size))

    module = types.ModuleType("reasoning_gym")
    module.__dict__["create_dataset"] = create_dataset
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    task = find_task("reasoning_gym:sums")
    problems = [task.problem(random.Random(seed), 1) for seed in range(3)]
    asked = [problem.messages[-1]["content"].splitlines()[0] for problem in problems]
    assert asked == [f"What is {seed} + 0?" for seed in (827307999, 288545018, 121443151)], (
        "a later version of ours goes on with them"
    )
    facts = problems[0].metadata
    answer = facts["entry"]["answer"]
    assert "<answer></answer>" in problems[0].messages[-1]["content"]
    assert task.score(f"<answer>1</answer>, no: <answer>\n{answer} </answer>", facts) == 1.0
    assert task.score(f"<answer>{answer}</answer>, no: <answer>1</answer>", facts) == 0.01
    assert task.score(answer, facts) == 0.01
    with pytest.raises(ConfigError, match="no task 'products'"):
        find_task("reasoning_gym:products")


def test_tasks_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from mlx_parallm.training.tasks.built_in import Problem, Task\n"
        "class Echo(Task):\n"
        "    name = 'echo'\n"
        "    def problem(self, random, level): return Problem(({'role': 'user', 'content': str(random.random())},))\n"
        "    def score(self, completion, metadata): return 1.0\n"
        "from mlx_parallm.training.tasks.environments import Environment\n"
        "class Room(Environment):\n"
        "    def reset(self, seed, level=1): return [{'role': 'user', 'content': f'room {seed}'}]\n"
        "    def step(self, messages): return [], 0.5, True\n"
    )
    assert type(find_task(f"{file}:Echo")).__name__ == "Echo"
    assert isinstance(find_task(f"{file}:Room"), EnvironmentTask)
    for wrong in ("nothing", "reasoning_gym:nothing", f"{file}:Task2"):
        with pytest.raises(ConfigError):
            find_task(wrong)


def scored(rewards: Rewards, name: str, count: int = 3) -> list[float | None]:
    return rewards.score(name, [Item("p", "c" * place, {}, [place]) for place in range(count)])


def test_functions_are_called_in_batches() -> None:
    sizes = []

    def lengths(prompts: Sequence[str], completions: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[int]:
        sizes.append(len(completions))
        return [len(text) for text in completions]

    rewards = Rewards({"lengths": lengths}, batch_size=4)  # type: ignore[dict-item]
    assert scored(rewards, "lengths", 10) == [float(place) for place in range(10)]
    assert sizes == [4, 4, 2]
    rewards.add_model("tokens", lambda texts: [float(sum(text)) for text in texts])
    assert scored(rewards, "tokens") == [0.0, 1.0, 2.0]
    with pytest.raises(InvalidRequestError, match="no scoring function 'x'"):
        scored(rewards, "x")


def test_what_fails_gives_no_score_and_holds_nobody_up() -> None:
    def wrong(*_: Any) -> Any:
        raise RuntimeError("no")

    rewards = Rewards(
        {
            "wrong": wrong,
            "slow": lambda *_: time.sleep(30),  # type: ignore[dict-item, return-value]
            "few": lambda *_: [1.0],
            "none": lambda *_: 1.0,  # type: ignore[dict-item, return-value]
            "odd": lambda *_: [1.0, float("nan"), "x"],  # type: ignore[list-item]
        },
        timeout=0.2,
    )
    begun = time.monotonic()
    for name in ("wrong", "slow", "few", "none"):
        assert scored(rewards, name) == [None] * 3
    assert scored(rewards, "odd") == [1.0, None, None]
    assert time.monotonic() - begun < 5
    assert (rewards.failures, rewards.timeouts) == (14, 1)


def test_functions_by_name(tmp_path: Path) -> None:
    file = tmp_path / "scores.py"
    file.write_text("def mine(prompts, completions, metadata):\n    return [2.0 for _ in completions]\nnumber = 3\n")
    rewards = Rewards.of([f"own={file}:mine", f"{file}:mine"], timeout=5, batch_size=8)
    assert scored(rewards, "own") == scored(rewards, "mine") == [2.0] * 3
    assert load_function("math:sqrt")(4) == load_function("math.sqrt")(4) == 2
    for bad in ("sqrt", "math:nothing", "no.such.module:f", f"{file}:number", f"{tmp_path}/none.py:f"):
        with pytest.raises(ConfigError):
            load_function(bad)


def test_rows_of_a_file_are_problems_and_those_held_out_are_never_drawn(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n} + 1 =", "answer": n + 1, "source": "made"} for n in range(20)]
    rows.append({"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "0 + 1 ="}]})
    path.write_text("\n".join(json.dumps(row) for row in [*rows, rows[0]]))  # the last is there twice
    task, same, other = (Rows(str(path), 0.2, seed) for seed in (1, 1, 2))
    held_out = {problem.key for problem in task.held_out()}
    assert len(held_out) == 4
    assert held_out == {problem.key for problem in same.held_out()} != {problem.key for problem in other.held_out()}
    chance = random.Random(0)
    drawn = {problem.key: problem for problem in (task.problem(chance, 1) for _ in range(500))}
    assert len(drawn) == 17
    assert not held_out & drawn.keys()
    one = next(problem for problem in drawn.values() if "source" in problem.metadata)
    assert one.metadata.keys() == {"answer", "source"}
    with pytest.raises(ConfigError, match="give --reward"):
        task.score("1", {})
    path.write_text('{"prompt": "a"}\n{"answer": 1}\n')
    with pytest.raises(ConfigError, match="line 2: field 'prompt' is missing"):
        Rows(str(path))


def test_calls_that_hang_are_few() -> None:
    """Each keeps a thread; behind some of them the function is not called until one has come back."""
    release, calls = threading.Event(), []

    def hang(prompts: Sequence[str], completions: Sequence[str], metadata: Sequence[Any]) -> list[float]:
        calls.append(1)
        release.wait(30)
        return [1.0] * len(prompts)

    rewards = Rewards({"hang": hang}, timeout=0.05)
    for _ in range(MAX_HANGING + 5):
        assert rewards.score("hang", [Item("p", "c")]) == [None]
    assert (len(calls), rewards.timeouts, rewards.failures) == (MAX_HANGING, MAX_HANGING, MAX_HANGING + 5)
    release.set()
    for _ in range(100):
        if not any(thread.name == "score-hang" for thread in threading.enumerate()):
            break
        time.sleep(0.05)
    assert rewards.score("hang", [Item("p", "c")]) == [1.0]
