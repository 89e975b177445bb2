"""A small Atropos environment: prompts made up on the spot, and some letters that are better than others.

`python tests/e2e/atropos_env.py serve …` runs it, as `--environment` does. A model of random weights can learn it.
"""

import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != HERE]  # http.py here is not Python's

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup  # noqa: E402

ANSWER_TOKENS = 6


class LettersEnv(BaseEnv):
    """The reward is the share of the letters a to h. Groups are whole calls, so all answers are to one prompt."""

    name = "letters"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config = BaseEnvConfig(
            group_size=8,
            max_token_length=64,
            max_batches_offpolicy=1,
            steps_per_eval=0,
            use_wandb=False,
            wandb_name="letters",  # the API does not take an environment without a name
            total_steps=100_000,
        )
        return config, [APIServerConfig(server_type="vllm", api_key="none")]

    async def setup(self) -> None:
        self.random = random.Random()

    async def get_next_item(self) -> str:
        return f"{self.random.random():.6f}"

    async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup, list[Any]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(
                messages=[{"role": "user", "content": item}],
                n=self.config.group_size,
                max_tokens=ANSWER_TOKENS,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup()
        group["tokens"] = [node.tokens for node in nodes]
        group["masks"] = [node.masked_tokens for node in nodes]
        group["inference_logprobs"] = [node.logprobs for node in nodes]
        group["scores"] = [score(choice.message.content or "") for choice in answer.choices]
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is held out."""


def score(text: str) -> float:
    return sum(letter in "abcdefgh" for letter in text) / max(1, len(text))


if __name__ == "__main__":
    LettersEnv.cli()
