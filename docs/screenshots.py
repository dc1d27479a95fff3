"""Pictures of the dashboard for the documents: python -m docs.screenshots (make screenshots)."""

import sys
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.support.busy_server import CHROMIUM, LONG_TOKENS, Load, served

FOLDER = Path(__file__).parent / "images"
SIZES = {"wide": {"width": 1280, "height": 860}, "narrow": {"width": 390, "height": 844}}
SCHEMES = ("light", "dark")
VIEWS = ("requests", "tenants", "prefixes", "plan", "pages", "overview")
COMMITTED = ("overview", "pages", "inspector")
"""Pictures in the repository; `--all` writes the others too."""
COLOURS = 160
LOAD_S = 20.0
CHARTS_MS = {"wide": 45_000, "narrow": 4000}


def main():
    """Write the pictures of a server under load."""
    if CHROMIUM is None:
        sys.exit("chromium is missing: apt-get install -y chromium")
    names = [name for name in sys.argv[1:] if name != "--all"]
    folder = Path(names[0]) if names else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    views = (*VIEWS, "timeline", "inspector") if "--all" in sys.argv else COMMITTED
    load = {"clients": 14, "without": "<|doc|>"}  # a mark of quire-tiny's training
    server = served("--kv-memory", "24MiB", "--swap-space", "8MiB", model="smollm2")
    with server as url, Load(url, **load), sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        time.sleep(LOAD_S)
        for size, viewport in SIZES.items():
            for scheme in SCHEMES:
                page = browser.new_context(viewport=viewport, color_scheme=scheme).new_page()
                page.goto(f"{url}/dashboard")
                page.wait_for_timeout(CHARTS_MS[size])
                for view in views:
                    show(page, view)
                    save(page, folder / f"dashboard-{view}-{size}-{scheme}.png")
                page.context.close()
        browser.close()


def show(page, view):
    """Open a view and wait until it shows current numbers."""
    if view in VIEWS:
        page.evaluate(f"location.hash = '#{view}'")
        if view == "pages":
            page.check("input[value=state]")
        page.wait_for_timeout(2000)
        return
    if page.text_content("#status-text") != "Paused":
        select_request(page)
        page.wait_for_timeout(1000)
        page.click("#pause")
    if view == "timeline":
        page.evaluate("document.querySelector('.detail').scrollIntoView()")
    else:
        page.locator(".tokens .token").nth(9).focus()
        end = "end" if page.viewport_size["width"] > 1000 else "start"
        page.evaluate(f"document.querySelector('.inspector').scrollIntoView({{block: '{end}'}})")
    page.wait_for_timeout(300)


def select_request(page):
    """Select a running request that evicts."""
    page.evaluate("location.hash = '#requests'")
    chosen = None
    while chosen is None:
        rows = page.evaluate("fetch('v1/kv/requests').then((response) => response.json())")
        left = [r for r in rows["running"] if r["num_evictions"] and r["max_tokens"] == LONG_TOKENS]
        left = [r for r in left if r["computed_tokens"] > r["prompt_tokens"] + 120]
        chosen = next((r for r in left if r["output_tokens"] < LONG_TOKENS // 2), None)
    page.evaluate(f"location.hash = '#requests/{chosen['request_id']}'")
    page.wait_for_selector("#view-requests .tokens .token")


def save(page, path):
    """Save the window with few colours: a small file."""
    page.screenshot(path=path)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
