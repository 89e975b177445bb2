"""`mlx_parallm_train` as a process: it serves while it trains, is killed and goes on, and leaves its files."""

import json
import random
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import load_file

from mlx_parallm.common_words import WORDS
from mlx_parallm.lora.adapter_files import read_folder
from mlx_parallm.training.storage.checkpoints import Checkpoints
from mlx_parallm.training.tasks.built_in import Problem, Task
from tests.support import forked
from tests.support.servers import free_port


class Letters(Task):
    """Some letters are better than others: a model of random weights can learn that."""

    name = "some letters"

    def problem(self, random: random.Random, level: int) -> Problem:
        return Problem(({"role": "user", "content": f"{random.random():.6f}"},))

    def score(self, completion: str, metadata: object) -> float:
        return sum(letter in "abcdefgh" for letter in completion) / max(1, len(completion))


def command(folder: Path, out: Path, port: int, *flags: str) -> list[str]:
    return [
        *(sys.executable, "-m", "mlx_parallm", "train", "--model-path", str(folder), "--port", str(port), "--no-ssd"),
        *("--task", f"{__file__}:Letters", "--answer-tokens", "6", "--group-size", "4", "--prompts-per-step", "2"),
        *("--eval-problems", "4", "--lora-rank", "4", "--learning-rate", "3e-4", "--checkpoint-dir", str(out)),
        *("--microbatch-tokens", "64", "--checkpoint-interval", "1", "--max-kl", "100", *flags),
    ]


def finish(arguments: list[str], seconds: float = 120) -> str:
    done = forked.run(arguments, seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def arrays(folder: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_file(folder / "trainer.safetensors").items()}


def last(out: Path) -> Path:
    """What a restart would go on from: after a rollback, not the one of the highest number."""
    found = Checkpoints(out / "policy", 1).latest()
    assert found is not None
    return found.path


def alarms(out: Path) -> list[int]:
    lines = [json.loads(line) for line in (out / "policy" / "log.jsonl").read_text().splitlines()]
    return sorted({line["step"] for line in lines if line.get("rolled_back")})


def test_a_run_leaves_its_log_its_report_and_both_formats(tiny_folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "rl.yaml"
    config.write_text(
        "training:\n  steps: 3\n"
        "rl_training:\n  algorithm: dapo\n  clip_high: 0.28\n"
        "model:\n  lora_target_modules: [q_proj, v_proj, o_proj]\n"
    )
    flags = ("--config", str(config), "--peft-export", str(tmp_path / "peft"))
    shown = finish(command(tiny_folder, tmp_path / "out", free_port(), *flags))
    assert "step 3/3" in shown
    assert "held out" in shown
    policy = tmp_path / "out" / "policy"
    lines = [json.loads(line) for line in (policy / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert (policy / "report.png").stat().st_size > 1000
    peft, config_of = read_folder(tmp_path / "peft", 1 << 20)
    own, _ = read_folder(last(tmp_path / "out"), 1 << 20)
    assert config_of["peft_type"] == "LORA"
    assert {path.rsplit(".", 1)[-1] for path in own.parts} == {"q_proj", "v_proj", "o_proj"}
    for path, part in own.parts.items():
        assert (part.a == peft.parts[path].a).all()


@pytest.mark.parametrize(
    ("kills", "rate"),
    [
        pytest.param(20, "3e-4", marks=pytest.mark.slow),
        pytest.param(20, "3e-3", marks=pytest.mark.slow),  # so fast that there are alarms, and ways back
    ],
)
def test_killed_at_random_it_ends_where_it_would_have(tiny_folder: Path, tmp_path: Path, kills: int, rate: str) -> None:
    flags = ("--steps", str(6 if kills < 10 else 40), "--learning-rate", rate, "--alarm-kl", "0.26")
    finish(command(tiny_folder, tmp_path / "whole", free_port(), *flags))
    chance = random.Random(kills)
    for _ in range(kills):
        port = free_port()
        process = forked.ForkedProcess(command(tiny_folder, tmp_path / "cut", port, *flags))
        for _ in range(400):
            time.sleep(0.05)
            if process.poll() is not None or _healthy(port):
                break
        time.sleep(0.6 * chance.random())
        process.kill()
        process.wait()
    finish(command(tiny_folder, tmp_path / "cut", free_port(), *flags))
    assert bool(alarms(tmp_path / "whole")) == (rate == "3e-3")
    assert alarms(tmp_path / "whole") == alarms(tmp_path / "cut")
    assert (
        last(tmp_path / "whole").name == last(tmp_path / "cut").name
    )  # a step whose rewards are all equal is no update
    assert arrays(last(tmp_path / "whole")) == arrays(last(tmp_path / "cut"))


def _healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


def test_it_serves_while_it_trains(tiny_folder: Path, tmp_path: Path) -> None:
    port = free_port()
    process = forked.ForkedProcess(command(tiny_folder, tmp_path, port, "--steps", "2000"))
    try:
        for _ in range(600):
            time.sleep(0.05)
            if _healthy(port):
                break
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            versions = set()
            for _ in range(20):
                answer = client.post("/generate", json={"prompt": "hello", "max_tokens": 8, "step_id": 1})
                assert answer.status_code == 200
                versions.add(answer.json()["policy_version"])
            assert len(versions) > 1
            assert client.get("/v1/training/status").json()["updates"] > 0
    finally:
        process.terminate()
        assert process.wait(30) == 0


def test_wrong_settings_are_said_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    for flags, word in (
        (("--task", "nothing"), "there is no task"),
        (("--mode", "rm"), "--pairs"),
        (("--algorithm", "ppo"), "invalid choice"),
        (("--lora-target-modules", "wobble"), "no layer called wobble"),
        (("--learning-rate", "-1"), "learning_rate"),
    ):
        done = forked.run(command(tiny_folder, tmp_path, free_port(), "--steps", "1", *flags), 60)
        assert done.returncode in (1, 2)
        assert word in done.stderr + done.stdout


TAKEN = socket.create_server(("127.0.0.1", 0))


def offline(folder: Path, out: Path, *flags: str) -> list[str]:
    """A run on a port that is taken: it must not want it."""
    return [
        *(sys.executable, "-m", "mlx_parallm", "train", "--model-path", str(folder), "--no-ssd"),
        *("--port", str(TAKEN.getsockname()[1])),
        *("--lora-rank", "4", "--checkpoint-dir", str(out), *flags),
    ]


def rows(path: Path, count: int, make: Callable[[Callable[[int], str]], dict[str, object]]) -> str:
    chance = random.Random(0)
    words = "the and ing ten sea wall tower other on in".split()
    made = [json.dumps(make(lambda k: " ".join(chance.choices(words, k=k)))) for _ in range(count)]
    path.write_text("\n".join(made) + "\n")
    return str(path)


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_sft_then_dpo_then_rl_each_go_on_from_the_last(tiny_folder: Path, tmp_path: Path) -> None:
    examples = rows(tmp_path / "sft.jsonl", 40, lambda some: {"prompt": some(4), "completion": f"zz {some(2)}"})
    flags = ("--mode", "sft", "--dataset", examples, "--learning-rate", "5e-3", "--epochs", "2", "--packing")
    shown = finish(offline(tiny_folder, tmp_path, *flags, "--peft-export", str(tmp_path / "peft"), "--patience", "3"))
    assert "36 examples to learn from, 4 held out" in shown
    losses = [line["held_out_loss"] for line in lines(tmp_path / "sft-log") if "held_out_loss" in line]
    assert losses[-1] < losses[0] - 1
    assert (tmp_path / "sft-log" / "report.png").is_file()
    own, settings = read_folder(tmp_path / "sft", 1 << 20)
    assert settings["fine_tune_type"] == "lora"
    assert {path.rsplit(".", 1)[-1] for path in own.parts} == {"q_proj", "v_proj"}
    assert read_folder(tmp_path / "peft", 1 << 20)[0].parts.keys() == own.parts.keys()

    def pair(some: Callable[[int], str]) -> dict[str, object]:
        return {"prompt": some(4), "chosen": f"{some(2)} a", "rejected": f"{some(2)} q"}

    pairs, others = rows(tmp_path / "dpo.jsonl", 40, pair), rows(tmp_path / "others.jsonl", 6, pair)
    flags = ("--mode", "dpo", "--dataset", pairs, "--learning-rate", "5e-3", "--init-adapter", str(tmp_path / "sft"))
    shown = finish(offline(tiny_folder, tmp_path, *flags, "--eval-dataset", others))
    assert "40 examples to learn from, 6 held out" in shown
    first, *_, after = [line for line in lines(tmp_path / "dpo-log") if "held_out_loss" in line]
    assert first["held_out_margin"] == pytest.approx(0, abs=1e-3)  # by the adapter that it began with
    assert after["held_out_accuracy"] > 0.5
    assert after["held_out_loss"] < first["held_out_loss"]

    questions = rows(tmp_path / "rl.jsonl", 30, lambda some: {"prompt": some(5), "answer": some(1)})
    arguments = [
        *command(tiny_folder, tmp_path, free_port(), "--steps", "2", "--init-adapter", str(tmp_path / "dpo")),
        *("--dataset", questions, "--reward", "exact@2", "--reward", "length=1@0.5", "--reward", "regex=a"),
    ]
    finish(arguments)
    log = lines(tmp_path / "policy")
    for entry in log[1:]:
        parts = entry["reward/exact"], entry["reward/length"], entry["reward/regex"]
        assert entry["reward"] == pytest.approx(2 * parts[0] + 0.5 * parts[1] + parts[2])
    assert {"held_out/exact", "held_out/length", "held_out/regex"} <= log[0].keys()


@pytest.mark.slow
def test_a_warmed_up_policy_needs_half_the_updates(own_cache: None, tmp_path: Path) -> None:
    """The embedded model, and the task and bar of `make rl-demo`: 0.15 above the score that it began with."""
    chance = random.Random(0)
    examples = []
    for _ in range(128):
        count = chance.randint(3, 6)
        topic, *others = chance.sample(WORDS, count)
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"Say something about {topic} in {count} words."},
            {"role": "assistant", "content": " ".join([topic.capitalize(), *others]) + "."},
        ]
        examples.append(json.dumps({"messages": messages}))
    (tmp_path / "examples.jsonl").write_text("\n".join(examples))
    common = ("--no-ssd", "--lora-layers", "8", "--checkpoint-dir")
    train = (sys.executable, "-m", "mlx_parallm", "train", *common)
    sft = ("--mode", "sft", "--dataset", str(tmp_path / "examples.jsonl"), "--learning-rate", "1e-3", "--epochs", "2")
    finish([*train, str(tmp_path), *sft], seconds=900)
    rl = (
        "--task",
        "length",
        "--group-size",
        "6",
        "--learning-rate",
        "2e-3",
        "--eval-problems",
        "24",
        "--eval-every",
        "1",
    )
    scores = {}
    for name, flags in {"cold": (), "warm": ("--init-adapter", str(tmp_path / "sft"))}.items():
        port = ("--port", str(free_port()))
        finish(
            [*train, str(tmp_path / name), *rl, *port, "--steps", "16" if name == "cold" else "8", *flags], seconds=1800
        )
        scores[name] = [line["held_out"] for line in lines(tmp_path / name / "policy")]
    print(scores)  # noqa: T201
    bar = scores["cold"][0] + 0.15
    needed = {
        name: next((step for step, score in enumerate(found) if score >= bar), 99) for name, found in scores.items()
    }
    assert needed["cold"] <= 16
    assert needed["warm"] <= needed["cold"] / 2


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--mode", "sft"), "needs --dataset"),
        (("--mode", "sft", "--dataset", "nothing.jsonl"), "can't be read"),
        (("--mode", "dpo", "--dataset", "BAD"), "line 1: field 'prompt' is missing"),
        (("--mode", "sft", "--dataset", "BAD", "--report-to", "neptune"), "there is tensorboard"),
        (("--dataset", "BAD"), "--reward"),
    ],
)
def test_wrong_datasets_are_said(tiny_folder: Path, tmp_path: Path, flags: tuple[str, ...], word: str) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n')
    arguments = offline(tiny_folder, tmp_path, *(str(bad) if flag == "BAD" else flag for flag in flags))
    done = forked.run(arguments, 60)
    assert done.returncode in (1, 2)
    assert word in " ".join((done.stderr + done.stdout).split())
    assert "Traceback" not in done.stderr


def test_a_run_whose_answers_get_no_reward_is_an_error(tiny_folder: Path, tmp_path: Path) -> None:
    questions = rows(tmp_path / "rl.jsonl", 30, lambda some: {"prompt": some(5)})
    arguments = [*command(tiny_folder, tmp_path, free_port()), "--dataset", questions, "--reward", "exact"]
    done = forked.run([*arguments, "--steps", "3"], 60)
    shown = " ".join((done.stderr + done.stdout).split())
    assert done.returncode == 1
    assert "the row has no field answer or reference" in shown
    assert "no completion got a reward up to the end of step 1" in shown
    assert "Traceback" not in shown


def test_a_reward_model_is_trained_served_and_scores(tiny_folder: Path, tmp_path: Path) -> None:
    chance = random.Random(0)
    words = "the and ing ten sea wall tower other on in".split()
    with (tmp_path / "pairs.jsonl").open("w") as file:
        for _ in range(40):
            prompt = " ".join(chance.choices(words, k=4))
            better, worse = (f"{' '.join(chance.choices(words, k=3))} {end}" for end in ("zz", "qq"))
            file.write(json.dumps({"prompt": prompt, "chosen": better, "rejected": worse}) + "\n")
    flags = ("--mode", "rm", "--pairs", str(tmp_path / "pairs.jsonl"), "--learning-rate", "5e-3", "--pair-epochs", "4")
    shown = finish(offline(tiny_folder, tmp_path, *flags))
    assert "held out: " in shown
    port = free_port()
    arguments = [
        *(sys.executable, "-m", "mlx_parallm", "serve", "--model-path", str(tiny_folder), "--port", str(port)),
        *("--no-ssd", "--reward-model", str(tmp_path / "reward-model")),
    ]
    process = forked.ForkedProcess(arguments)
    try:
        for _ in range(600):
            time.sleep(0.05)
            if _healthy(port):
                break
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            chats = [
                [{"role": "user", "content": "the sea"}, {"role": "assistant", "content": f"on wall {end}"}]
                for end in ("zz", "qq")
            ]
            for path in ("/v1/rewards/score", "/v1/score", "/pooling"):
                found = client.post(path, json={"input": chats}).json()
                assert found["model"] == "reward-model"
                scores = [entry["score"] for entry in found["data"]]
                assert scores[0] > scores[1]
            alone = client.post("/v1/rewards/score", json={"messages": chats[0]}).json()["data"][0]["score"]
            assert alone == pytest.approx(scores[0], abs=1e-4)
            body = {"prompts": ["the sea"], "n": 2, "max_tokens": 4, "scoring_function": "reward-model"}
            samples = client.post("/v1/rl/rollout", json=body).json()["groups"][0]["samples"]
            assert all(isinstance(sample["reward"], float) for sample in samples)
            for wrong in ({}, {"input": []}, {"input": "x", "model": "nobody"}, {"input": [[]]}):
                assert client.post("/v1/rewards/score", json=wrong).status_code in (400, 404)
    finally:
        process.terminate()
        process.wait(30)
