"""CartPole over HTTP: trains two policies, writes their folders, serves them, and plays.

    pip install 'mlx-parallm[rl-env]'
    python examples/cartpole.py                # a minute on two cores

`cartpole` sees everything and is an MLP. `cartpole-memory` does not see the velocities and is a GRU: it must remember.
Both learn by the cross-entropy method: draw policies around a mean, play, and move the mean to the best of them. Then
100 episodes each are played through `/v1/rl/act`, 500 steps at most; the one with memory with its state carried by the
client, kept on the server, and shuffled among the episodes. Exit code 1 where a policy holds the pole for less than 475
steps on average, or where the shuffled state does not make it fail.
"""

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import httpx
import numpy as np
from safetensors.numpy import save_file

STEPS = 500  # of an episode that never fails
SOLVED, FAILED = 475.0, 200.0
SCALE = np.array([2.4, 2.0, 0.2, 2.0], np.float32)  # of cart, its speed, pole, its speed
POPULATION, EPISODES, ELITE = 64, 4, 8
ACTIONS = 2
Weights = dict[str, Any]  # each with the population as its first axis


def sigmoid(x: Any) -> Any:
    return 0.5 * (1 + np.tanh(0.5 * x))


def product(x: Any, weight: Any, bias: Any) -> Any:
    """(P, E, in) by (P, out, in): each policy of the population with its own weights."""
    return x @ weight.transpose(0, 2, 1) + bias[:, None]


@dataclass(frozen=True, slots=True)
class Player:
    """An architecture: which parts of an observation it sees, its weights, a step of it, and its network.json."""

    name: str
    sees: tuple[int, ...]
    hidden: int
    recurrent: bool

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        size, seen = self.hidden, len(self.sees)
        head = {"logits.weight": (ACTIONS, size), "logits.bias": (ACTIONS,)}
        if not self.recurrent:
            return {"core.weight": (size, seen), "core.bias": (size,)} | head
        core = {"weight_ih_l0": (3 * size, seen), "weight_hh_l0": (3 * size, size)}
        core |= {"bias_ih_l0": (3 * size,), "bias_hh_l0": (3 * size,)}
        return {f"core.{name}": shape for name, shape in core.items()} | head

    def unpack(self, vectors: Any) -> Weights:
        found, at = {}, 0
        for name, shape in self.shapes.items():
            size = int(np.prod(shape))
            found[name] = vectors[:, at : at + size].reshape(len(vectors), *shape)
            at += size
        return found

    def act(self, weights: Weights, observations: Any, state: Any) -> tuple[Any, Any]:
        """The likeliest actions (P, E) and the new state (P, E, hidden)."""
        x = observations[..., self.sees] / SCALE[list(self.sees)]
        if self.recurrent:
            inward = product(x, weights["core.weight_ih_l0"], weights["core.bias_ih_l0"])
            onward = product(state, weights["core.weight_hh_l0"], weights["core.bias_hh_l0"])
            (reset, update, new), (reset_on, update_on, new_on) = (np.split(part, 3, -1) for part in (inward, onward))
            kept = sigmoid(update + update_on)
            state = (1 - kept) * np.tanh(new + sigmoid(reset + reset_on) * new_on) + kept * state
        else:
            state = np.tanh(product(x, weights["core.weight"], weights["core.bias"]))
        return product(state, weights["logits.weight"], weights["logits.bias"]).argmax(-1), state

    def definition(self) -> dict[str, Any]:
        size, seen = self.hidden, len(self.sees)
        inputs: dict[str, Any] = {"observation": {"shape": ["batch", seen]}}
        outputs: dict[str, Any] = {"logits": {"shape": ["batch", ACTIONS]}}
        policy: dict[str, Any] = {"distribution": "categorical", "logits": "logits"}
        layers: list[dict[str, Any]] = [{"type": "normalize", "name": "scaled", "input": "observation", "epsilon": 0}]
        if self.recurrent:
            inputs["h"] = {"shape": ["batch", 1, size]}
            outputs["new_h"] = {"from": "core.h"}
            policy["state"] = {"h": "new_h"}
            layers += [{"type": "gru", "name": "core", "inputs": ["scaled", "h"], "hidden_size": size}]
        else:
            layers += [{"type": "linear", "name": "core", "out_features": size}, {"type": "tanh"}]
        layers += [{"type": "linear", "name": "logits", "out_features": ACTIONS}]
        return {"inputs": inputs, "layers": layers, "outputs": outputs, "policy": policy}

    def save(self, folder: Path, vector: Any) -> None:
        tensors = {name: np.ascontiguousarray(array[0]) for name, array in self.unpack(vector[None]).items()}
        scale = SCALE[list(self.sees)]
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors | {"scaled.mean": np.zeros_like(scale), "scaled.var": scale**2}, folder / "model.safetensors")
        (folder / "network.json").write_text(json.dumps(self.definition(), indent=2) + "\n")


STATES = {
    "none": "",
    "client": ", state carried by the client",
    "session": ", state kept on the server",
    "shuffled": ", state shuffled among the episodes",
}
MLP = Player("cartpole", (0, 1, 2, 3), 16, recurrent=False)
MEMORY = Player("cartpole-memory", (0, 2), 8, recurrent=True)


def environments(count: int) -> Any:
    return gymnasium.make_vec("CartPole-v1", num_envs=count, vectorization_mode="vector_entry_point")


def evaluate(player: Player, envs: Any, vectors: Any, seed: int) -> Any:
    """Mean steps of each policy's first episodes."""
    policies, episodes = len(vectors), envs.num_envs // len(vectors)
    weights, state = player.unpack(vectors), np.zeros((policies, episodes, player.hidden), np.float32)
    observations, _ = envs.reset(seed=seed)
    alive, steps = np.ones(envs.num_envs, bool), np.zeros(envs.num_envs)
    while alive.any():
        actions, state = player.act(weights, observations.reshape(policies, episodes, 4), state)
        observations, _, ended, cut, _ = envs.step(actions.reshape(-1))
        steps += alive
        alive &= ~(ended | cut)
    return steps.reshape(policies, episodes).mean(1)


def train(player: Player, seed: int, generations: int) -> Any:
    """The weights of a policy that holds 100 poles to the end, as one vector."""
    chance, begun = np.random.default_rng(seed), time.perf_counter()
    size = sum(int(np.prod(shape)) for shape in player.shapes.values())
    mean, spread = np.zeros(size, np.float32), np.ones(size, np.float32)
    envs, exam = environments(POPULATION * EPISODES), environments(100)
    for generation in range(generations):
        drawn = (mean + spread * chance.standard_normal((POPULATION, size))).astype(np.float32)
        scores = evaluate(player, envs, drawn, int(chance.integers(1 << 30)))
        best = drawn[np.argsort(-scores)[:ELITE]]
        noise = 0.02 * max(0.0, 1 - generation / 100) + 1e-4  # keeps the search from narrowing too soon
        mean, spread = best.mean(0), np.sqrt(best.var(0) + noise).astype(np.float32)
        if scores.max() == STEPS:
            score = float(evaluate(player, exam, mean[None], int(chance.integers(1 << 30)))[0])
            say(f"  generation {generation:3}: {scores.mean():5.1f} steps in the population, {score:5.1f} at its mean")
            if score > STEPS - 1:
                break
    say(f"  {player.name}: {time.perf_counter() - begun:.0f} s of training")
    return mean


def play(url: str, player: Player, mode: str, seed: int, episodes: int = 100) -> float:
    """Mean steps over HTTP, all episodes beside each other. `mode`: who keeps the state, and whether it is shuffled."""
    envs, chance = environments(episodes), np.random.default_rng(seed)
    observations, _ = envs.reset(seed=seed)
    alive, steps = np.ones(episodes, bool), np.zeros(episodes)
    body: dict[str, Any] = {"model_id": player.name, "deterministic": True}
    if mode == "session":
        body |= {"session_ids": [f"{seed}-{row}" for row in range(episodes)], "episode_starts": [True] * episodes}
    with httpx.Client(base_url=url, timeout=60) as client:
        while alive.any():
            seen = observations[:, player.sees].astype(np.float32).tolist()
            response = client.post("/v1/rl/act", json=body | {"observations": seen})
            if response.is_error:
                raise SystemExit(response.text)
            answer = response.json()
            if mode == "session":
                body["episode_starts"] = [False] * episodes
            elif "new_hidden_states" in answer:
                state = answer["new_hidden_states"]["h"]
                order = chance.permutation(episodes) if mode == "shuffled" else range(episodes)
                body["hidden_states"] = {"h": [state[row] for row in order]}
            observations, _, ended, cut, _ = envs.step(np.array(answer["actions"]))
            steps += alive
            alive &= ~(ended | cut)
    return float(steps.mean())


@contextlib.contextmanager
def server(folders: list[Path]) -> Iterator[str]:
    """The URL of a process that serves the policies."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlx_parallm", "serve", "--port", str(port), "--log-level", "WARNING", "--no-ssd"]
    command += [part for folder in folders for part in ("--model-path", f"{folder.name}={folder}")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not start")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("cartpole"), help="folder for the policies")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--generations", type=int, default=300, help="at most (default: %(default)s)")
    args = parser.parse_args()
    say("training")
    for player in (MLP, MEMORY):
        player.save(args.out / player.name, train(player, args.seed, args.generations))
    good = True
    say("playing 100 episodes over HTTP")
    with server([args.out / player.name for player in (MLP, MEMORY)]) as url:
        for player, mode in ((MLP, "none"), (MEMORY, "client"), (MEMORY, "session"), (MEMORY, "shuffled")):
            score = play(url, player, mode, args.seed + 1)
            as_it_should = score < FAILED if mode == "shuffled" else score >= SOLVED
            good = good and as_it_should
            kept = STATES[mode]
            say(f"  {player.name}{kept}: {score:.1f} steps on average" + ("" if as_it_should else ", which is wrong"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
