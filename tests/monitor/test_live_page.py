"""The monitor's page in a real browser: what is seen is what is in the file."""

from __future__ import annotations

import math
import re
import sys
import types

import pytest
import torch
from torch import nn

import varreg
from tests.support import browser as browsers
from varreg.monitor import read
from varreg.monitor.journal import Journal
from varreg.monitor.journal import read as read_log
from varreg.monitor.live_page import html

needs_browser = pytest.mark.skipif(browsers.PROGRAM is None, reason="needs Chromium")


def train(path, n=40, **options):
    """Train with VR-SGD, and return the monitor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    observer, optimizer = varreg.observe(model), varreg.VRSGD(model.parameters(), lr=0.1)
    monitor = varreg.Monitor(observer, optimizer, path, every=1, **options)
    for _ in range(n):
        x = torch.randn(16, 6)
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    return monitor


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of a run that has ended, with layers."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    monitor = train(tmp_path_factory.mktemp("page"), layers=True, title="<b>mine</b> & </script>")
    monitor.close()
    torch.set_default_dtype(default)
    return monitor.page


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory):
    with browsers.browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture
def browser(shared_browser):
    """A browser as it is at first."""
    shared_browser.messages.clear()
    shared_browser.size(1280)
    shared_browser.scheme("light")
    shared_browser.point(0, 0)
    return shared_browser


def shown(value: float) -> str:
    """A number as a figure has it: five digits."""
    if math.isinf(value):
        return "∞"
    if abs(value) >= 1e6:
        return f"{value:.3e}"
    text = f"{float(f'{value:.5g}'):.10f}".rstrip("0").rstrip(".")
    return text if abs(value) >= 1e-3 else f"{value:.3e}"


HOVER = """
[...document.querySelectorAll('#%s .u-series')].map(
  r => [r.querySelector('.u-label').textContent, r.querySelector('.u-value').textContent])
"""


@needs_browser
def test_hover_values_are_those_of_the_file(page, browser):
    browser.open(page)
    records = read(page).records
    names = {
        "loss": {"loss": "loss"},
        "noise": {"noise scale": "noise_scale", "at least": "noise_scale_low", "batch": "batch"},
        "lambda": {"effective": "lambda_effective", "median": "lambda_q50", "10 %": "lambda_q10"},
        "grad": {"|ḡ|": "grad_norm", "its standard error": "grad_error"},
        "layer-scale": {"0": "layer_noise_scale#0", "2": "layer_noise_scale#1"},
        "layer-snr": {"0": "layer_snr#0", "2": "layer_snr#1"},
    }
    names["noise"]["at most"] = "noise_scale_high"  # edges of bands are drawn nearer than they are
    names["lambda"]["90 %"] = "lambda_q90"
    for chart, columns in names.items():
        browser.run(f"document.getElementById('{chart}').scrollIntoView({{block: 'center'}})")
        box = browser.run(
            f"(({{left, top, width, height}}) => [left, top, width, height])"
            f"(document.querySelector('#{chart} .u-over').getBoundingClientRect())"
        )
        seen = set()
        for part in (0.1, 0.5, 0.9):
            browser.point(box[0] + part * box[2], box[1] + box[3] / 2)
            found = dict(browser.run(HOVER % chart))
            record = records[int(found.pop("step")) - 1]
            seen.add(record["step"])
            for label, column in columns.items():
                name, _, layer = column.partition("#")
                value = record[name][int(layer)] if layer else record[name]
                assert found[label] == shown(value), (chart, label)
        assert len(seen) == 3
    assert browser.messages == []
    assert browser.requests == []


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fits_and_follows_the_scheme(page, browser, width, scheme):
    browser.size(width)
    browser.scheme(scheme)
    browser.open(page)
    wide = browser.run(
        "[...document.querySelectorAll('body *')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []
    assert browser.run("document.documentElement.scrollWidth") == width
    back = browser.run("getComputedStyle(document.documentElement).backgroundColor")
    red = int(re.match(r"rgb\((\d+)", back)[1])
    assert red < 64 if scheme == "dark" else red > 200
    assert browser.run("document.querySelectorAll('figure canvas').length") == 11
    # and something is drawn in each
    assert browser.run(
        "[...document.querySelectorAll('figure canvas')].every(c => new Set(new Uint32Array("
        "c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size > 10)"
    )
    assert browser.messages == []


@needs_browser
def test_a_change_of_scheme_is_drawn_at_once(page, browser):
    browser.open(page)
    pixels = "document.querySelector('#loss canvas').toDataURL()"
    before = browser.run(pixels)
    browser.scheme("dark")
    browser.until(lambda: browser.run(pixels) != before)
    assert browser.messages == []


@needs_browser
def test_series_are_switched_off_and_axes_changed(page, browser):
    browser.open(page)
    names = (
        "[...document.querySelectorAll('#grad .u-series')].map(r => r.classList.contains('u-off'))"
    )
    assert browser.run(names) == [False, False, False]
    label = "document.querySelectorAll('#grad .u-series .u-label')[2]"
    browser.run(f"{label}.scrollIntoView({{block: 'center'}})")
    at = browser.run(f"((r) => [r.x + 3, r.y + 3])({label}.getBoundingClientRect())")
    browser.click(*at)
    assert browser.run(names) == [False, False, True]
    browser.run("document.querySelector('#loss button').click()")
    assert browser.run("document.querySelector('#loss button').textContent") == "log axis"
    browser.open(page)  # which a reader's settings outlive
    assert browser.run(names) == [False, False, True]
    assert browser.run("document.querySelector('#loss button').textContent") == "log axis"
    browser.run("sessionStorage.clear()")
    assert browser.messages == []


@needs_browser
def test_names_are_text(page, browser):
    browser.open(page)
    assert browser.run("document.title") == "<b>mine</b> & </script>"
    assert browser.run("document.querySelectorAll('#title b').length") == 0
    assert browser.run("document.querySelectorAll('#layers-list li').length") == 2


@needs_browser
def test_a_page_refreshes_itself_while_training_runs(tmp_path, browser, monkeypatch):
    monkeypatch.setattr("varreg.monitor.publisher.PAGE_SECONDS", 0.1)
    monkeypatch.setattr("varreg.monitor.publisher.PAGE_SHARE", 1.0)
    monitor = train(tmp_path, 5)
    monitor._publisher.publish()
    browser.open(monitor.page)
    assert browser.run("document.getElementById('status').className") == "running"
    browser.size(1280, 300)
    browser.run("document.querySelector('#loss button').click(), scrollTo(0, 200)")
    loads = browser.loads
    monitor.noise.observer.model.zero_grad()
    model = monitor.noise.observer.model
    model(torch.randn(8, 6)).square().mean().backward()
    monitor.step(2.5)
    monitor._publisher.publish()
    browser.until(lambda: browser.loads > loads)
    step = "document.querySelector('#loss .u-series .u-value').textContent"
    assert browser.run(step) == "6"
    assert browser.run("scrollY") == 200
    assert browser.run("document.querySelector('#loss button').textContent") == "log axis"
    monitor.close()
    loads = browser.loads
    browser.until(lambda: browser.loads > loads)
    assert browser.run("document.getElementById('status').textContent").startswith("ended")
    browser.run("new Promise(done => setTimeout(done, 1500))")
    loads = browser.loads
    end = browser.run("Date.now()") + 2500  # longer than it waited before
    browser.until(lambda: browser.run("Date.now()") > end)
    assert browser.loads == loads
    browser.run("sessionStorage.clear()")
    assert browser.messages == []


@needs_browser
def test_what_is_not_finite(tmp_path, browser):
    """A run that broke, an infinite noise scale, one record, and none at all."""
    journal = Journal(tmp_path / "monitor.jsonl")
    journal.append({"session": {"format": 1, "id": "a", "after": 0, "title": "x"}})
    target = tmp_path / "page.html"
    inf, nan = float("inf"), float("nan")
    common = {"batch": 8, "noise_scale_low": 0.0, "noise_layers": [], "signal_layers": []}
    for step, loss, scale in ((0, 0.0, 0.0), (1, 2.0, inf), (2, nan, 3.0), (3, 1e30, inf)):
        if step:
            values = {"loss": loss, "noise_scale": scale, "noise_scale_high": inf, "snr": 0.5}
            journal.append({"step": step, **values, **common})
        target.write_text(html(journal.log, {"written": 0.0, "refresh": 1.0}))
        browser.open(target)
        assert browser.messages == []
        assert "no news since" in browser.run("document.getElementById('status').textContent")
    assert browser.run("document.querySelectorAll('figure').length") == 4
    assert dict(browser.run(HOVER % "noise"))["noise scale"] == "∞"
    journal.close()


@needs_browser
def test_a_loss_that_is_far_above_all_others_does_not_flatten_them(tmp_path, browser):
    journal = Journal(tmp_path / "monitor.jsonl")
    journal.append({"session": {"format": 1, "id": "a", "after": 0, "title": "x"}})
    losses = [2.3, 1.5, 1.0, 1e23, 0.8]
    for step, loss in enumerate(losses, 1):
        journal.append({"step": step, "loss": loss, "noise_layers": [], "signal_layers": []})
    target = tmp_path / "page.html"
    target.write_text(html(journal.log, {"written": 0.0}))
    journal.close()
    browser.open(target)
    assert browser.run("document.querySelector('#loss small').textContent") == "▲ far above: 1"
    for _ in range(2):  # on a linear axis, and on a logarithmic one
        box = browser.run(
            "(({left, top, width, height}) => [left, top, width, height])"
            "(document.querySelector('#loss .u-over').getBoundingClientRect())"
        )
        heights = []
        for i, loss in enumerate(losses):
            browser.point(box[0] + (0.02 + 0.24 * i) * box[2], box[1] + box[3] / 2)
            assert dict(browser.run(HOVER % "loss"))["loss"] == shown(loss)
            heights.append(
                browser.run(
                    "document.querySelectorAll('#loss .u-cursor-pt')[0].getBoundingClientRect().y"
                )
            )
        assert all(box[1] - 10 < y < box[1] + box[3] for y in heights)
        assert heights[4] - heights[0] > 0.3 * box[3]  # 2.3 and 0.8 are apart
        assert heights[3] < heights[0]
        browser.run("document.querySelector('#loss button').click()")
    browser.run("sessionStorage.clear()")
    assert browser.messages == []


def test_the_page_needs_no_network(page):
    text = page.read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', text)
    assert "@import" not in text
    assert "fetch(" not in text
    assert "XMLHttpRequest" not in text
    assert text.count("</script>") == 3  # the title has one, and is data


def test_the_library_is_the_one_that_is_recorded():
    import hashlib

    from varreg.monitor.live_page import ASSETS

    folder = ASSETS / "uplot"
    notice = (folder / "README.md").read_text()
    for name in ("uPlot.iife.min.js", "uPlot.min.css"):
        content = (folder / name).read_bytes()
        assert (
            f"| `{name}` | {len(content):,} | `{hashlib.sha256(content).hexdigest()}` |" in notice
        )
    version = re.match(r"# uPlot ([\d.]+)", notice)[1]
    assert f"(v{version})" in (folder / "uPlot.iife.min.js").read_text()[:80]
    assert "MIT" in (folder / "LICENSE").read_text()


def test_in_a_notebook(tmp_path, monkeypatch):
    """`show()` hands the page to the notebook, and what it shows is kept up to date."""
    updates = []

    def display(thing, display_id):
        assert display_id
        updates.append(thing._repr_html_())
        return types.SimpleNamespace(update=lambda new: updates.append(new._repr_html_()))

    shell = types.ModuleType("IPython")
    shell.get_ipython = lambda: object()
    inside = types.ModuleType("IPython.display")
    inside.display = display
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", inside)
    monitor = train(tmp_path, 3)
    assert monitor.show() == monitor.page
    monitor.close()
    assert len(updates) == 2
    for text in updates:
        assert text.startswith("<iframe")
        assert "&quot;refresh&quot;" not in text  # a frame without an address cannot be read again
    assert "&quot;end&quot;: {&quot;end&quot;: &quot;ended&quot;" in updates[-1]


def test_in_a_terminal(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    monitor = train(tmp_path, 2)
    assert monitor.show() == tmp_path / "monitor.html"
    assert opened == [(tmp_path / "monitor.html").as_uri()]
    monitor.close()
    assert len(read_log(tmp_path).records) == 2
