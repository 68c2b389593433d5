"""Links lead to files and headings, tables are those of the saved results, each sentence has its
line, and sessions are copied as code. (`make docs` checks the links between pages of the site, and
their headings.)
"""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pygments
import pytest
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonConsoleLexer
from tools import prose
from tools.tables import __main__ as command
from tools.tables import marks
from tools.tables.catalog import TABLES, render

from tests.support import browser as browsers

ROOT = Path(__file__).parent.parent
PAGES = sorted(ROOT.glob("*.md"))
SITE = sorted((ROOT / "docs").rglob("*.md"))
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?\)")


def links(text: str) -> list[str]:
    """Return where the links and pictures of a page lead to; code has none."""
    return LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site's generator have them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M)
    plain = [re.sub(r"[`*_]|\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", t.lower()).strip().replace(" ", "-") for t in plain}


def broken(page: Path) -> list[str]:
    """Return the links of a page that lead to no file, or to no heading in it."""
    found = []
    for link in links(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    assert broken(page) == []


@pytest.mark.parametrize("page", SITE, ids=lambda page: page.name)
def test_figures_and_results_of_the_site_are_there(page):
    assert [link for link in broken(page) if ".md" not in link and not link.startswith("#")] == []


def test_a_broken_link_is_seen(tmp_path):
    (tmp_path / "there.md").write_text("# A title: `code`, and more\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md#a-title-code-and-more) [b](there.md#no) [c](gone.md) `[d](code.md)`\n"
        "[two\nlines](#here) ![p](gone.svg) [e](https://example.org)\n\n# Here\n\n"
        "```bash\n[f](fence.md)\n```\n"
    )
    assert broken(page) == ["there.md#no", "gone.md", "gone.svg"]


def test_the_tables_of_all_pages_are_those_of_their_files(capsys):
    assert command.main(["--check"]) == 0, capsys.readouterr().out


WITH_EXAMPLES = [f"tables.{name}" for name in ("cells", "catalog", "experiments", "speed")]


@pytest.mark.parametrize("name", [*WITH_EXAMPLES, "prose"])
def test_examples_of_the_tools(name):
    done = doctest.testmod(importlib.import_module(f"tools.{name}"), optionflags=doctest.ELLIPSIS)
    assert done.attempted
    assert not done.failed


def test_each_sentence_has_a_line_of_its_own(capsys):
    assert prose.main(["--check"]) == 0, capsys.readouterr().out


def test_more_words_than_the_limit_are_an_error(capsys, monkeypatch):
    assert prose.count(each=True) == 0, capsys.readouterr().out
    assert "docs/index.md" in capsys.readouterr().out
    monkeypatch.setattr(prose, "LIMIT", 1)
    assert prose.main(["--check"]) == 1
    assert "the limit is 1." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "better"),
    [
        ("Two. Sentences.\n", "Two.\nSentences.\n"),
        ("One that is\nsplit.\n", "One that is split.\n"),
        ("1. In a list. Two.\n2. More\n", "1. In a list.\n   Two.\n2. More\n"),
        ("Said.) Then\nmore.\n", "Said.)\nThen more.\n"),
        ("McCandlish et al. 2018, `a. B` and\n$x. Y$ end.\n", None),
        ("| a table. Its | cells. Stay. |\n", "| a table. Its | cells. Stay. |\n"),
        ("```\ncode. Code\nis. Code\n```\n", "```\ncode. Code\nis. Code\n```\n"),
        ("$$\na. B\nc\n$$\n", "$$\na. B\nc\n$$\n"),
    ],
)
def test_sentences_are_told_apart(text, better):
    better = text.replace("\n", " ").strip() + "\n" if better is None else better
    assert prose.formatted(text) == better
    assert prose.formatted(better) == better


PAGE = """Text.

<!-- table: norms from
benchmarks/results/norms.json -->

| old |

<!-- end of table -->

More.
"""


def test_a_table_that_differs_is_named_with_its_first_line(tmp_path, monkeypatch):
    monkeypatch.setattr(marks, "ROOT", tmp_path)
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    (said,) = marks.differences(path, render)
    assert said.splitlines()[:2] == ["page.md, table norms:", "  page: | old |"]
    assert "| with norms over without |" in said

    assert marks.renew(path, render)
    assert not marks.renew(path, render)
    assert list(marks.differences(path, render)) == []
    new = path.read_text()
    assert new.startswith(PAGE.partition("| old |")[0])
    assert new.endswith(PAGE.partition("| old |")[2])

    saved = re.search(r"\d\.\d\d", new)[0]
    path.write_text(new.replace(saved, "9.87", 1))  # a number that was typed by hand
    (said,) = marks.differences(path, render)
    assert "9.87" in said.splitlines()[1]
    assert saved in said.splitlines()[2]

    cut = new.splitlines(keepends=True)
    last = max(i for i, line in enumerate(cut) if line.startswith("|"))
    path.write_text("".join(cut[:last] + cut[last + 1 :]))  # a line is missing
    (said,) = marks.differences(path, render)
    assert "page: (no line)" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PAGE.replace("<!-- end of table -->", ""), "has no end"),
        (PAGE.replace("| old |", "<!-- table: norms -->"), "begins inside of another"),
        (PAGE.replace("table: norms", "table: nothing"), "there is no table nothing; there are: "),
        (PAGE.replace("table: norms", "table:norms"), "a mark is not written as"),
        (PAGE.replace("norms.json", "gone.json"), "there is no file benchmarks/results/gone.json"),
    ],
)
def test_wrong_marks_are_errors(text, words):
    with pytest.raises(marks.TableError, match=words):
        marks.renewed(text, render)


def test_all_tables_that_have_a_file_are_on_a_page():
    """So that none is checked in vain, and no name is used that is not shown."""
    shown = {
        part.name
        for path in command.pages()
        for part in marks.split(path.read_text())
        if isinstance(part, marks.Block)
    }
    unsaved = {"ewc", "ideas", "lab-loop"}  # their commands have not been run yet
    assert set(TABLES) - shown <= unsaved


def test_examples_in_docstrings_get_fences():
    pytest.importorskip("griffe")
    fenced = importlib.import_module("tools.signatures").fenced
    text = "Adds.\n\n>>> x = 1\n\n>>> x + 1  # doctest: +ELLIPSIS\n2\n\nAlways.\n"
    code = "```pycon\n>>> x = 1\n\n>>> x + 1\n2\n```"
    assert fenced(text) == f"Adds.\n\n{code}\n\nAlways.\n"
    assert fenced("No example.") == "No example."


def wide(page: Path) -> list[str]:
    """Return the lines of code on a page that do not fit beside its menus at 1280 px."""
    code = [line for block in FENCE.findall(page.read_text()) for line in block.splitlines()]
    return [line for line in code if len(line) > 88 and "─" not in line]


NARROW = [ROOT / "README.md", *(p for p in SITE if p.parent.name in ("docs", "learn", "howto"))]


@pytest.mark.parametrize("page", NARROW, ids=lambda page: page.name)
def test_code_fits_beside_the_menus(page):
    said = ("To the same loss", "varreg.verify: verified", "The loss weighs samples")  # outputs
    assert [line for line in wide(page) if not any(words in line for words in said)] == []


SESSION = """\
>>> x = 1

>>> def f():
...     a = ">>> no prompt"
...
...     return a
>>> f()
'>>> no prompt'
...
>>> 1 / 0
Traceback (most recent call last):
  File "<stdin>", line 1, in <module>
ZeroDivisionError: division by zero
>>> x
1

"""
CODE = """\
x = 1

def f():
    a = ">>> no prompt"

    return a
f()
1 / 0
x
"""


@pytest.mark.skipif(browsers.PROGRAM is None, reason="needs Chromium")
def test_the_copy_button_gives_code_without_prompts_and_outputs(tmp_path):
    """A button that copies its target, or the text that it is given, as that of the site does."""
    shown = pygments.highlight(SESSION, PythonConsoleLexer(), HtmlFormatter(nowrap=True))
    page = tmp_path / "page.html"
    page.write_text(f"""<meta charset="utf-8">
        <pre id="session"><code>{shown}</code></pre><pre id="plain"><code>make test</code></pre>
        <button data-clipboard-target="#session > code"><b>copy</b></button>
        <button data-clipboard-target="#plain > code">copy</button>
        <script>{(ROOT / "docs/assets/copy.js").read_text()}
        document.body.addEventListener("click", (event) => {{
          const button = event.target.closest("button");
          const target = document.querySelector(button.dataset.clipboardTarget);
          window.copied = button.dataset.clipboardText ?? target.textContent;
        }});</script>""")
    with browsers.browser(tmp_path / "browser") as browser:
        browser.open(page)
        browser.run("document.querySelectorAll('b')[0].click()")
        assert browser.run("copied") == CODE
        browser.run("document.querySelectorAll('button')[1].click()")
        assert browser.run("copied") == "make test"
        assert browser.messages == []
