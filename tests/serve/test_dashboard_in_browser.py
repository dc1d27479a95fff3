"""The dashboard in Chromium: live views, inspector, keys, keyboard, and rules of accessibility."""

import json
import shutil
import subprocess
import tarfile

import pytest

from support.busy_server import CHROMIUM, LONG_TOKENS, Load, served

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is missing: apt-get install chromium"),
]

SIZES = {"wide": {"width": 1280, "height": 860}, "narrow": {"width": 390, "height": 844}}
VIEWS = ("overview", "pages", "requests", "tenants", "prefixes", "plan")
AXE = "axe-core@4.11.0"
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def url():
    with served() as url, Load(url):
        yield url


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """Source of axe-core, from the npm registry."""
    folder = tmp_path_factory.mktemp("axe")
    if shutil.which("npm") is None:
        pytest.skip("npm is missing: axe-core cannot be downloaded")
    command = ["npm", "pack", AXE, "--silent", "--pack-destination", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(f"axe-core cannot be downloaded: {done.stderr[-200:]}")
    [packed] = folder.glob("*.tgz")
    with tarfile.open(packed) as archive:
        return archive.extractfile("package/axe.min.js").read().decode()


@pytest.fixture
def open_page(browser):
    """Open a page; fail on any message of an error in its console."""
    contexts, errors = [], []

    def note(text, expected=None):
        if expected is None or expected not in text:
            errors.append(text)

    def open_at(address, size="wide", scheme="light", expected=None):
        context = browser.new_context(
            viewport=SIZES[size], color_scheme=scheme, reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda m: note(m.text, expected) if m.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert errors == []


def select_long_request(page):
    """Select a running request that evicts and runs for some time."""
    for _ in range(200):
        rows = page.evaluate("fetch('v1/kv/requests').then((response) => response.json())")
        left = [r for r in rows["running"] if r["num_evictions"] and r["max_tokens"] == LONG_TOKENS]
        found = next((r for r in left if r["output_tokens"] < LONG_TOKENS // 3), None)
        if found is not None:
            break
        page.wait_for_timeout(50)
    request_id = json.dumps(found["request_id"])
    page.evaluate(f"location.hash = '#requests/' + encodeURIComponent({request_id})")
    page.wait_for_selector("#view-requests .tokens .token")


LEVELS = "new Set([...document.querySelectorAll('.tokens .token')].map(t => t.dataset.level)).size"


def pause_with_evicted_tokens(page):
    """Select requests until one has KV and lacks tokens, and pause: it could be preempted."""
    for _ in range(20):
        select_long_request(page)
        page.wait_for_timeout(500)
        page.click("#pause")
        page.wait_for_timeout(300)  # answers that are on their way
        has_lanes = "in each of 32 lanes" in page.text_content(".inspector .facts")
        if has_lanes and page.evaluate(LEVELS) > 2:
            return
        page.click("#pause")
    pytest.fail("no request with evicted tokens was found")


def map_of(page):
    return page.evaluate("document.querySelector('.map').toDataURL()")


def test_page_map_changes_under_load(open_page, url):
    page = open_page(f"{url}/dashboard#pages")
    page.wait_for_selector("#view-pages tbody tr a")
    first = map_of(page)
    page.wait_for_function(
        "before => document.querySelector('.map').toDataURL() !== before", arg=first
    )

    label = page.get_attribute(".map", "aria-label")
    assert "pages" in label
    assert "free" in label
    page.check("input[value=state]")
    page.wait_for_selector("#view-pages tbody th:has-text('Tokens evicted')")


def module(page, name, body):
    """The value of an expression about a module of the page."""
    return page.evaluate(f"import('./dashboard/assets/{name}.js').then((m) => {body})")


def test_numbers_are_written_with_units_and_ordinals(open_page, url):
    page = open_page(f"{url}/dashboard")
    ordinals = module(page, "format", "[1, 2, 3, 4, 11, 12, 13, 21, 102].map(m.ordinal)")
    assert ordinals == ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd"]
    times = module(page, "format", "[59.94, 60, 200, 3600, 9000].map(m.seconds)")
    assert times == ["59.9 s", "1 min", "3 min 20 s", "1 h", "2 h 30 min"]


def test_area_of_a_page_is_in_proportion_to_its_bytes(open_page, url):
    page = open_page(f"{url}/dashboard")
    sizes = [4224, 64, 64, 64, 50_000, 192, 4224] * 40

    areas = module(
        page,
        "pages",
        f"""{{
      const sizes = {sizes}, view = new m.Pages(null), ends = [0];
      for (const size of sizes) ends.push(ends.at(-1) + size);
      view.body = {{ page_classes: [{{}}, {{}}] }};
      view.cells = {{ ends, squares: sizes.reduce((sum, size) => sum + size * size, 0) }};
      view.snap = (x) => x;
      view.measure(600);
      return sizes.map((_, cell) => {{
        let area = 0;
        view.parts(cell, (x, y, width) => {{ area += width; }});
        return [area, view.at(ends[cell]) === cell];
      }});
    }}""",
    )

    total = sum(area for area, _ in areas)
    for size, (area, is_found) in zip(sizes, areas, strict=True):
        assert area / total == pytest.approx(size / sum(sizes))
        assert is_found


def test_axis_labels_are_not_clipped(open_page, url):
    page = open_page(f"{url}/dashboard")

    labels = module(
        page,
        "chart",
        """import('./dashboard/assets/format.js').then(({ seconds }) => {
      const format = (value) => `about ${seconds(value)}`;
      const chart = new m.TimeChart("x", [{ name: "a", color: "red" }], { format });
      document.getElementById("main").append(chart.node);
      const drawn = [], fill = CanvasRenderingContext2D.prototype.fillText;
      CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        if (this.textAlign === "right") drawn.push([text, x - this.measureText(text).width]);
        fill.call(this, text, x, y);
      };
      chart.add(1, [390]);
      chart.draw();
      CanvasRenderingContext2D.prototype.fillText = fill;
      return drawn;
    })""",
    )

    assert [text for text, _ in labels[:2]] == ["0", "about 4 min 10 s"]
    assert all(left >= 0 for _, left in labels)


def test_charts_and_events_begin_before_the_page_was_opened(open_page, url):
    page = open_page(f"{url}/dashboard")
    page.wait_for_selector(".feed li")
    rows = "fetch('v1/kv/history').then((r) => r.json()).then((body) => body.data.length)"
    while page.evaluate(rows) < 20:
        page.wait_for_timeout(500)
    page.reload()
    page.wait_for_selector(".status[data-kind=live]")

    page.click("#pause")
    assert page.locator(".feed li").count() == 10
    # the line of running requests goes on to the left of now
    assert page.evaluate(
        """() => {
      const canvas = document.querySelectorAll('.charts canvas')[1], scale = devicePixelRatio;
      const at = canvas.width - Math.round(48 * scale), height = canvas.height - 26 * scale;
      const data = canvas.getContext('2d').getImageData(at, 0, 30 * scale, height).data;
      return data.some((value, i) => i % 4 === 2 && value - data[i - 2] > 60);
    }"""
    )


def test_page_map_is_read_with_the_keyboard(open_page, url):
    page = open_page(f"{url}/dashboard#pages")
    page.wait_for_selector("#view-pages tbody tr a")
    page.focus(".map")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "End"):
        page.keyboard.press(key)
        assert page.text_content(".map-detail").startswith("Page ")


@pytest.mark.parametrize("size", SIZES)
def test_inspector_shows_the_tokens_that_lanes_retain(open_page, url, size):
    page = open_page(f"{url}/dashboard#requests", size)
    page.wait_for_selector("#view-requests tbody tr a")
    pause_with_evicted_tokens(page)

    assert "<|doc|>" in page.text_content(".tokens .token >> nth=0")
    page.focus(".tokens .token >> nth=0")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.position") == "2"
    assert page.text_content(".token-detail").startswith("Token 2 ")
    assert page.locator(".lane").count() == 32
    assert page.locator(".timeline rect").count() > 0
    assert page.locator(".timeline-list tbody tr").count() >= 3


def test_events_arrive_and_pause_stops_all_requests(open_page, url):
    page = open_page(f"{url}/dashboard")
    page.wait_for_selector(".feed li")
    page.wait_for_selector(".status[data-kind=live]")
    page.click("#pause")
    assert page.text_content("#status-text") == "Paused"
    page.wait_for_timeout(500)  # answers that are on their way
    sent = []
    page.on("request", lambda request: sent.append(request.url))
    page.wait_for_timeout(2500)
    assert sent == []
    page.click("#pause")
    page.wait_for_selector(".status[data-kind=live]")


def test_what_if_slider_changes_the_number_of_sequences(open_page, url):
    page = open_page(f"{url}/dashboard#plan")
    page.wait_for_selector(".result strong")
    before = int(page.text_content(".result strong").replace(",", ""))
    page.focus("#plan-budget")
    page.keyboard.press("End")
    page.wait_for_function(
        "n => Number(document.querySelector('.result strong').textContent.replace(',', '')) > n",
        arg=before,
    )
    page.check("#plan-evicts")
    page.wait_for_function("() => !document.querySelector('#plan-retained').disabled")
    found = "document.querySelector('.notes').textContent"
    first = page.evaluate(found)
    page.select_option("#plan-codec", "int4")
    page.wait_for_function(f"before => {found} !== before", arg=first)


def test_navigation_by_keyboard_shows_the_focus(open_page, url):
    page = open_page(f"{url}/dashboard")
    page.wait_for_selector(".status[data-kind=live]")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus("#nav-tenants")
    page.keyboard.press("Enter")
    page.wait_for_selector("#view-tenants .tenant")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.get_attribute("#nav-tenants", "aria-current") == "page"
    page.keyboard.press("Tab")
    assert page.evaluate("document.title").startswith("Tenants")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_views_have_no_serious_fault_and_do_not_overflow(open_page, url, axe, size, scheme):
    page = open_page(f"{url}/dashboard", size, scheme)
    page.wait_for_selector(".status[data-kind=live]")
    faults = {}
    for view in (*VIEWS, "inspector"):
        if view == "inspector":
            select_long_request(page)
        else:
            page.evaluate(f"location.hash = '#{view}'")
            page.wait_for_timeout(1200)
        page.click("#pause")
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{view} is {wide} pixels wider than the window"
        page.evaluate(axe)
        found = page.evaluate("axe.run().then((found) => found.violations)")
        for fault in found:
            if fault["impact"] in ("serious", "critical"):
                nodes = [node["html"][:120] for node in fault["nodes"][:3]]
                faults[f"{view}: {fault['id']}"] = nodes
        page.click("#pause")
    assert faults == {}


def test_server_with_keys_asks_for_one(open_page, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('red = "sk-red-00000000"\nblue = "sk-blue-00000000"\n')
    red = {"authorization": "Bearer sk-red-00000000"}
    with served("--tenant-keys", str(keys)) as url, Load(url, red, clients=3):
        page = open_page(f"{url}/dashboard#tenants", expected="401 (Unauthorized)")
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key-input", "sk-red-00000000")
        page.click("#key-form .primary")
        page.wait_for_selector("#view-tenants .tenant h3:has-text('red')")
        assert page.locator("#view-tenants .tenant").count() == 1
        assert page.evaluate("sessionStorage.getItem('quire.key')") == "sk-red-00000000"
        assert page.evaluate("document.cookie + JSON.stringify(localStorage)").find("sk-red") < 0
        page.evaluate("location.hash = '#pages'")
        page.wait_for_selector("#view-pages tbody tr a")
        page.context.close()  # before the server stops
