"""Kills at random moments of training: nothing that was acknowledged is lost, and no number names two policies."""

import contextlib
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers import ours, running

PROMPT = list(range(20, 40))
FLAGS = ["--enable-rl-training", "--update-frequency", "8", "--checkpoint-seconds", "1", "--learning-rate", "1e-3"]


@dataclass
class Observed:
    """What clients were told, over all lives of the server."""

    sent: int = 0  # trajectories, acknowledged or not
    taken: int = 0  # trajectories that were acknowledged
    updates: int = 0  # over HTTP, acknowledged
    newest: int = 0  # version of those
    policies: dict[int, list[float]] = field(default_factory=dict)  # by version, how it scores one answer
    lock: threading.Lock = field(default_factory=threading.Lock)
    wrong: list[str] = field(default_factory=list)

    def see(self, version: int, scores: list[float]) -> None:
        with self.lock:
            known = self.policies.setdefault(version, scores)
            if known != pytest.approx(scores, abs=1e-5):
                self.wrong.append(f"version {version} scores {scores}, and scored {known} before")


def look(client: httpx.Client, seen: Observed) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "request_id": "look",
        "logprobs": 0,
    }
    answer = client.post("/generate", json=body)
    answer.raise_for_status()
    seen.see(answer.json()["policy_version"], answer.json()["logprobs"])


def give_feedback(client: httpx.Client, seen: Observed, chance: random.Random) -> None:
    """Two answers to one prompt, and a reward for each."""
    prompt = [chance.randrange(5, 90) for _ in range(12)]
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 1.0, "n": 2, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body)
    answer.raise_for_status()
    for index in range(2):
        seen.sent += 1
        reward = {"request_id": answer.json()["id"], "index": index, "reward": chance.random()}
        client.post("/v1/training/feedback", json=reward).raise_for_status()
        seen.taken += 1


def update(client: httpx.Client, seen: Observed, chance: random.Random) -> None:
    answers = [[chance.randrange(5, 90) for _ in range(5)] for _ in range(3)]
    trajectories = [
        {"group_id": "g", "prompt_ids": PROMPT, "completion_ids": ids, "reward": chance.random()} for ids in answers
    ]
    seen.sent += 3
    answer = client.post("/v1/training/update", json={"trajectories": trajectories})
    if answer.status_code == 409:  # refused: it would move the policy too far
        return
    answer.raise_for_status()
    seen.taken += 3
    seen.updates += 1
    seen.newest = max(seen.newest, answer.json()["policy_version"])


def check(client: httpx.Client, seen: Observed) -> None:
    found: dict[str, Any] = client.get("/v1/training/status").json()
    assert seen.taken <= found["trajectories_collected"] <= seen.sent
    places = ("buffered", "used", "flat", "stale", "dropped")
    assert found["trajectories_collected"] == sum(found[f"trajectories_{place}"] for place in places), found
    assert found["policy_version"] >= seen.newest, "an update that was acknowledged is lost"
    assert found["updates"] >= seen.updates
    look(client, seen)


def life(url: str, seen: Observed, seconds: float, chance: random.Random, kill: Any) -> None:
    """Clients at work until the server is killed under them."""

    def work(job: Any, *more: Any) -> None:
        with httpx.Client(base_url=url, timeout=30) as client, contextlib.suppress(httpx.TransportError):
            while True:
                job(client, seen, *more)

    threads = [
        threading.Thread(target=work, args=(give_feedback, random.Random(chance.random()))),
        threading.Thread(target=work, args=(update, random.Random(chance.random()))),
        threading.Thread(target=work, args=(look,)),
    ]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    kill()
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(tiny_folder: Path, tmp_path: Path, kills: int) -> None:
    seen, chance = Observed(), random.Random(kills)
    flags = [*FLAGS, "--checkpoint-dir", str(tmp_path)]
    for number in range(kills + 1):
        with running(ours(str(tiny_folder), flags)) as server:
            with httpx.Client(base_url=server.url, timeout=30) as client:
                check(client, seen)
            if number < kills:
                life(server.url, seen, chance.uniform(0.3, 4), chance, server.process.kill)
    assert seen.taken > 4 * kills
    assert not seen.wrong, seen.wrong
