"""Two models behind one URL, side by side: each request reaches the one that it names."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.support.servers import ServerProcess, free_port, running
from tests.tiny import save_tiny, tiny


def test_each_request_reaches_the_model_it_names(tiny_folder: Path, tmp_path: Path) -> None:
    second = tmp_path / "qwen"
    second.mkdir()
    save_tiny(tiny("qwen3"), second)
    port = free_port()
    command = [sys.executable, "-m", "mlx_parallm", "serve", "--port", str(port)]
    command += ["--model-path", f"small={tiny_folder}", "--model-path", f"other={second}"]
    with (
        running(ServerProcess(command, port, "small", fork=True)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):

        def ask(model: str) -> str:
            body = {"model": model, "prompt": "hello there", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            text: str = answer.json()["choices"][0]["text"]
            return text

        assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == ["small", "other"]
        alone = {model: ask(model) for model in ("small", "other", "default")}
        assert alone["default"] == alone["small"] != alone["other"]
        with ThreadPoolExecutor(8) as pool:
            names = ["small", "other"] * 8
            assert list(pool.map(ask, names)) == [alone[name] for name in names]
        missing = client.post("/v1/completions", json={"model": "third", "prompt": "x"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        models = client.get("/debug/metrics").json()["models"]
        plans = [models[name]["memory"] for name in ("small", "other")]
        assert plans[0]["limit"] == plans[1]["limit"]
        parts = sum(plan[part] for plan in plans for part in ("weights", "rows", "blocks", "adapters", "training"))
        assert parts + plans[0]["kept"] <= plans[0]["limit"], "the models have planned the same memory twice"
