"""Every view of the dashboard in a real Chromium, against a real server that serves and trains meanwhile.

Runs where a Chromium is installed, with `pip install -e '.[browser]'`. With DASHBOARD_KEY=KEY the server has that admin
key, and pages are signed in. With DASHBOARD_SCREENSHOTS=docs/images it also writes the pictures of docs/DASHBOARD.md.
"""

import os
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.browser import SIZES, Complaints, chromium_path
from tests.support.servers import ServerProcess, ours, running

playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
CHROMIUM = chromium_path()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]

VIEWS = ("live", "models", "training", "rollouts", "playground", "requests")
SCORES = """
def shorter(prompts, completions, metadata):
    return [-float(len(text)) for text in completions]
"""
PATIENCE = 60_000  # milliseconds
# For screenshots: a folder, or `embedded`. The tiny model's answers make no sense.
MODEL = os.environ.get("DASHBOARD_MODEL")
KEY = os.environ.get("DASHBOARD_KEY")
HEADERS = {"Authorization": f"Bearer {KEY}"} if KEY else {}


class Traffic(threading.Thread):
    """Asks, rolls out and updates until it is stopped."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._client = httpx.Client(base_url=url, headers=HEADERS, timeout=60)
        self._stopped = threading.Event()
        self.failures: list[str] = []

    def run(self) -> None:
        seed = 0
        while not self._stopped.wait(0.3):
            seed += 1
            try:
                self._turn(seed)
            except httpx.HTTPError as error:
                self.failures.append(str(error))

    def _turn(self, seed: int) -> None:
        prompt = "Once upon a time, in a small house by the sea, there lived"
        body = {"prompt": prompt, "max_tokens": 24, "seed": seed, "stream": seed % 2 == 0, "temperature": 1.0}
        body["n"] = 1 + seed % 7
        self._client.post("/v1/completions", json=body)
        if seed % 3 == 0:
            rollout = {"prompts": [f"{prompt} {seed}"], "n": 4, "max_tokens": 24, "temperature": 1.0, "seed": seed}
            self._client.post("/v1/rl/rollout", json=rollout | {"scoring_function": "shorter", "submit": True})
            self._client.post("/v1/training/update", json={})

    def stop(self) -> None:
        self._stopped.set()
        self.join(30)
        self._client.close()


@contextmanager
def serving(model: str | None, flags: Sequence[str] = ()) -> Iterator[ServerProcess]:
    """Started and stopped on another thread: this one has Playwright's event loop."""
    with ThreadPoolExecutor(1) as other:
        held = running(ours(model, flags))
        server = other.submit(held.__enter__).result()
        try:
            yield server
        finally:
            other.submit(held.__exit__, None, None, None).result()


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("dashboard")
    (folder / "scores.py").write_text(SCORES)
    flags = [
        "--enable-rl-training",
        *("--scoring-function", f"shorter={folder / 'scores.py'}:shorter", "--update-frequency", "0"),
        *("--learning-rate", "1e-3", "--lora-rank", "4", "--checkpoint-dir", str(folder / "checkpoints")),
        *(("--admin-key", KEY, "--api-key", f"{KEY}-of-users") if KEY else ()),
    ]
    with serving(None if MODEL == "embedded" else MODEL or str(tiny_folder), flags) as found:
        yield found


@pytest.fixture(scope="module")
def traffic(server: ServerProcess) -> Iterator[None]:
    worker = Traffic(server.url)
    worker.start()
    with httpx.Client(base_url=server.url, headers=HEADERS, timeout=60) as client:
        for _ in range(300):
            if client.get("/v1/training/status").json()["updates_published"] >= 3:
                break
            threading.Event().wait(0.2)
    yield
    worker.stop()
    assert worker.failures == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def opened(
    browser: Any,
    url: str,
    view: str = "live",
    *,
    width: int = 1280,
    theme: str = "light",
    refused: str = "",
    **more: Any,
) -> Iterator[Any]:
    """A page of the dashboard; at its end it must have asked nobody else and complained of nothing.

    `refused`: the status that requests may be refused with.
    """
    context = browser.new_context(
        viewport={"width": width, "height": SIZES[width]}, color_scheme=theme, reduced_motion="reduce", **more
    )
    context.set_default_timeout(PATIENCE)
    if KEY and "extra_http_headers" not in more:
        answer = context.request.post(f"{url}/dashboard/login", data={"key": KEY}, headers={"Origin": url})
        assert answer.ok, answer.text()
    page, complaints = context.new_page(), Complaints()
    complaints.watch(page, url.removeprefix("http://"))
    page.goto(f"{url}/dashboard#{view}")
    page.wait_for_selector("h1")
    yield page
    context.close()
    assert [one for one in complaints.errors if not refused or f"a status of {refused}" not in one] == []
    assert complaints.foreign == []


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=HEADERS, timeout=60) as found:
        yield found


def tile(page: Any, name: str) -> str:
    return str(page.locator(f".tile:has(dt:text-is('{name}')) dd").inner_text())


def wait_for_tile(page: Any, name: str, pattern: str) -> None:
    page.wait_for_function(
        """([name, pattern]) => [...document.querySelectorAll('.tile')].some(tile =>
             tile.querySelector('dt').textContent === name &&
             new RegExp(pattern).test(tile.querySelector('dd').textContent))""",
        arg=[name, pattern],
    )


READY = {
    "live": ".chart canvas",
    "models": "table .chip.good",
    "training": ".chart canvas",
    "rollouts": ".sample .token",
    "playground": "textarea[name=message]",
    "requests": "tbody tr",
}


def test_live_numbers_move(browser: Any, server: ServerProcess, traffic: None) -> None:
    with opened(browser, server.url) as page:
        wait_for_tile(page, "Generated", r"^[1-9]")
        wait_for_tile(page, "First token, half within", r"\d")
        assert page.locator(".chart canvas").count() == 6
        before = tile(page, "Requests answered")
        page.wait_for_function(
            "before => ![...document.querySelectorAll('.tile dd')].some(one => one.textContent === before)", arg=before
        )
        assert "connected" in page.locator("header .state").inner_text()
        assert re.search(r"\d+ %", page.locator(".chart:has-text('Where the time goes') .legend").inner_text())
        assert page.locator("text=Tiers of the prefix cache").count() == 1
        assert page.locator("meter").count() == 6


def test_models_and_adapters(browser: Any, server: ServerProcess, traffic: None, client: httpx.Client) -> None:
    with opened(browser, server.url, "models") as page:
        rows = page.locator("section:has(h2:text-is('Adapters')) tbody tr")
        rows.first.wait_for()
        adapters = client.get("/v1/adapters").json()["data"]
        shown = page.locator("code[title]").evaluate_all("all => all.map(one => one.title)")
        assert set(shown) & {one["digest"] for one in adapters}
        page.get_by_role("spinbutton", name="Share, %").fill("75")
        page.get_by_role("button", name="Switch").click()
        page.wait_for_selector(".notice.good")
        assert client.get("/server_info").json()["models"][0]["serves"] == {"base": 0.25, "policy": 0.75}
        wait_for_tile(page, f"{client.get('/server_info').json()['served_model_name']} is answered by", "policy")
        page.get_by_role("button", name="Model alone").click()
        page.wait_for_function("() => document.querySelector('.notice.good')?.textContent")
        label = rows.first.locator("b").inner_text()
        row = page.locator(f"tr:has(b:text-is('{label}'))")
        with page.expect_response("**/model/switch-lora") as answer:
            row.get_by_role("button", name="Serve").click()
        assert answer.value.ok
        assert client.get("/server_info").json()["models"][0]["serves"] == {label: 1.0}
        with page.expect_response("**/v1/adapters/pin") as answer:
            row.get_by_role("button", name="Pin").click()
        assert answer.value.ok
        client.post("/model/switch-lora", json={"version": "policy"})
        with page.expect_response("**/v1/models/load") as answer:
            page.locator("section:has(h2:text-is('Models')) tbody").get_by_role("button", name="Pin").first.click()
        assert answer.value.ok
        page.get_by_label("Name", exact=True).fill("nowhere")
        page.get_by_label("Folder, .gguf file or hub id").fill("/no/such/folder")
        page.get_by_role("button", name="Load model").click()
        page.wait_for_selector(".notice:not(:empty), .chip.bad")


def test_a_rollback_needs_two_presses(browser: Any, server: ServerProcess, traffic: None, client: httpx.Client) -> None:
    with opened(browser, server.url, "models") as page:
        button = page.get_by_role("button", name="Roll back").first
        button.wait_for()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "rollback" in request.url else None)
        row = page.locator("tr:has(button:text('Roll back'))").first
        row.get_by_role("button", name="Roll back").click()
        again = page.get_by_role("button", name="Press again to roll back")
        again.wait_for()
        assert asked == []
        again.click()
        page.wait_for_selector(".notice.good, .notice.bad")
        assert len(asked) == 1


def test_training_over_updates(browser: Any, server: ServerProcess, traffic: None, client: httpx.Client) -> None:
    with opened(browser, server.url, "training") as page:
        page.wait_for_selector(".chart canvas")
        assert page.locator(".chart canvas").count() == 8
        reward = page.locator(".chart:has(h3:text-is('Reward')) .legend").inner_text()
        assert re.search(r"mean\s+-?\d", reward), reward
        page.locator("tbody .chip:text-is('published')").first.wait_for()
        page.get_by_role("button", name="Pause generation").click()
        page.wait_for_selector("text=Generation is paused")
        assert client.get("/is_paused").json()["is_paused"]
        page.wait_for_selector("header .state:has-text('paused')")
        page.get_by_role("button", name="Resume").click()
        page.wait_for_selector("text=Generation goes on")
        assert not client.get("/is_paused").json()["is_paused"]
        page.get_by_role("button", name="Write checkpoint").click()
        page.wait_for_selector("text=A checkpoint is written")


def test_rollouts_side_by_side(browser: Any, server: ServerProcess, traffic: None) -> None:
    with opened(browser, server.url, "rollouts") as page:
        page.wait_for_selector(".sample .token")
        group = page.locator(".group").first
        assert group.locator(".sample").count() == 4
        assert page.locator(".token[class*='lp-']").count() > 10
        page.get_by_label("Colour tokens by").select_option("version")
        page.wait_for_selector(".sample .token[class*='v-']")
        assert page.locator(".sample .token[class*='lp-']").count() == 0
        every = page.locator(".sample").count()
        page.get_by_label("Rewards").select_option("0")
        page.wait_for_function("every => document.querySelectorAll('.sample').length < every", arg=every)
        first = page.locator(".sample .token").first
        first.focus()
        page.keyboard.press("ArrowRight")
        focused = page.evaluate("document.activeElement.dataset.place")
        assert focused == "1"
        assert re.search(r"log-probability -?\d.*version \d", page.locator(".detail").first.inner_text())


def test_the_playground_streams_and_compares(
    browser: Any, server: ServerProcess, traffic: None, client: httpx.Client
) -> None:
    versions = []
    for one in client.get("/v1/adapters").json()["data"][-2:]:  # pinned, since new ones push the old out every second
        assert client.post("/v1/adapters/pin", json={"name": "policy", "version": one["version"]}).status_code == 200
        versions.append(f"policy@{one['version']}")
    with opened(browser, server.url, "playground") as page:
        page.get_by_label("max_tokens").fill("16")
        page.locator("textarea[name=message]").fill("Hello there")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message .note:has-text('tokens/s')")
        tokens = page.locator(".message .token")
        assert tokens.count() >= 1
        tokens.first.hover()
        page.wait_for_selector(".alternatives")
        assert page.locator(".alternatives tr").count() == 5
        second = page.get_by_label("Compare with")
        second.select_option(versions[-1])
        page.get_by_label("Talk to").select_option(versions[0])
        page.get_by_role("button", name="Begin anew").click()
        page.locator("textarea[name=message]").fill("Tell me more")
        page.get_by_role("button", name="Send").click()
        page.wait_for_function("() => document.querySelectorAll('.message .note').length === 2")
        assert page.locator(".columns.two > section").count() == 2
        assert page.locator(".message h3").all_inner_texts() == ["You", versions[0], "You", versions[-1]]


def test_a_wrong_setting_is_told(browser: Any, server: ServerProcess, traffic: None) -> None:
    with opened(browser, server.url, "playground", refused="400") as page:
        page.get_by_label("max_tokens").fill("99999")
        page.locator("textarea[name=message]").fill("Hello")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message .notice.bad:has-text('context')")


def test_recent_requests(browser: Any, server: ServerProcess, traffic: None) -> None:
    with opened(browser, server.url, "requests") as page:
        page.wait_for_selector("tbody tr:has-text('/v1/completions')")
        streamed = page.locator("tbody tr:has-text('/v1/completions'):has-text('policy@')")
        streamed.first.wait_for()
        page.get_by_label("Only those with").fill("rollout")
        page.wait_for_function(
            "() => [...document.querySelectorAll('tbody tr')].every(row => row.textContent.includes('/v1/rl/rollout'))"
        )
        assert "Once upon" not in page.content()


def test_the_keyboard_is_enough(browser: Any, server: ServerProcess, traffic: None) -> None:
    with opened(browser, server.url) as page:
        page.keyboard.press("Tab")
        assert "Skip" in page.evaluate("document.activeElement.textContent")
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.getAttribute('href')") == "#training":
                break
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none"
        page.keyboard.press("Enter")
        page.wait_for_selector("h1:text-is('Training')")
        assert page.locator("nav a[aria-current]").inner_text() == "Training"


def test_dark_and_light(browser: Any, server: ServerProcess, traffic: None) -> None:
    def background(page: Any) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    with opened(browser, server.url, theme="dark") as page:
        dark = background(page)
        page.emulate_media(color_scheme="light")
        page.wait_for_function("dark => getComputedStyle(document.body).backgroundColor !== dark", arg=dark)
        page.get_by_role("button", name="Dark colours").click()
        assert background(page) == dark
        page.reload()
        page.wait_for_selector("h1")
        assert background(page) == dark, "the choice is kept"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", list(SIZES))
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_accessible_and_fits(
    browser: Any, server: ServerProcess, traffic: None, view: str, width: int, theme: str
) -> None:
    with opened(browser, server.url, view, width=width, theme=theme) as page:
        page.wait_for_selector(READY[view])
        if view == "playground":
            page.locator("textarea[name=message]").fill("What is the capital of France?")
            page.keyboard.press("Enter")
            page.wait_for_selector(".message .note:has-text('tokens/s')")
            page.locator(".message .token").first.hover()
        if view == "live":
            wait_for_tile(page, "Generated", r"^[1-9]")
        found = axe.Axe().run(page).response["violations"]
        serious = [
            (one["id"], one["nodes"][0]["html"][:200], one["nodes"][0].get("failureSummary"))
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == []
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width, "the page scrolls sideways"
        if folder := os.environ.get("DASHBOARD_SCREENSHOTS"):
            page.wait_for_timeout(6000 if view == "live" else 500)
            page.screenshot(path=f"{folder}/dashboard-{view}-{width}-{theme}.png")


def test_a_key_is_asked_for(browser: Any, tiny_folder: Path) -> None:
    flags = ["--admin-key", "sesame", "--api-key", "open"]
    with serving(str(tiny_folder), flags) as server:
        with browser.new_context() as context:
            page = context.new_page()
            page.goto(f"{server.url}/dashboard")
            page.get_by_label("Admin key").fill("sesame")
            with page.expect_response("**/dashboard/login") as answer:
                page.get_by_role("button", name="Sign in").click()
            assert answer.value.request.post_data_json == {"key": "sesame"}
            if answer.value.ok:
                page.wait_for_selector(".chart canvas", timeout=PATIENCE)
            else:
                page.wait_for_selector("[role=alert]:not(:empty)", timeout=PATIENCE)
        with opened(browser, server.url, extra_http_headers={"Authorization": "Bearer sesame"}) as page:
            page.wait_for_selector(".chart canvas")


def test_it_says_when_the_server_is_gone(browser: Any, tiny_folder: Path) -> None:
    with browser.new_context() as context, serving(str(tiny_folder)) as server:
        page = context.new_page()
        page.goto(f"{server.url}/dashboard")
        page.wait_for_selector("header .state:has-text('connected')", timeout=PATIENCE)
        assert server.stop() == 0  # an open dashboard does not keep it up
        page.wait_for_selector("header .state:has-text('connect'):has(.dot.bad)", timeout=PATIENCE)
