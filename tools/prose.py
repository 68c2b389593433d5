"""Put every sentence of the pages on a line of its own, so that a change shows what it changes.
Count the words of running prose, which may not grow beyond a limit.

    python -m tools.prose --check    name the first wrong line of each page; print the words
    python -m tools.prose --write    correct all pages
    python -m tools.prose --words    print the words of each page

Code, tables, formulas, headings and the output of `tools.tables` do not change. A short bold
beginning (`**Waits.** Forward …`) stays with the sentence after it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 12_100
"""Words of running prose in README.md and docs/ together. The aim is 10,000: lower the limit when a
page is shortened.
"""
_WORD = re.compile(r"\S*\w\S*")
_ITEM = re.compile(r"(\s*)([-*] |\d+\. )")
_KEPT = re.compile(r"\s*(\||#|!\[|<!--|<|:::|!!!|options:|members:|- - -|\[[^\]]+\]: )|\s*$")
_INLINE = re.compile(r"(`+)(?:(?!\1).)+?\1|\$[^$\s](?:[^$]*[^$\s])?\$|\]\([^)]*\)")
_END = re.compile(
    r"(?<=[.!?])([*_)\"'”]*) +(?=(?:varreg|torch|bfloat16)\b|[A-Z0-9λρτΣΩℓ`$\[(*_\"“\x00])"
)
_NO_END = re.compile(r"(?:\b(?:al|e\.g|i\.e|cf|vs|No|pp?)\.|…|\.\.\.)[*_)\"']*$")
_RUN_IN = re.compile(r"\*\*[^*]+[.?!]\*\*$")


def sentences(text: str) -> list[str]:
    """Return the sentences of a paragraph.

    >>> sentences("One. Two `a. B` (et al. 2018) is two. **Run in.** Three!")
    ['One.', 'Two `a. B` (et al. 2018) is two.', '**Run in.** Three!']
    """
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\0{len(kept) - 1}\0"

    found: list[str] = []
    start = 0
    hidden = _INLINE.sub(keep, text)
    for match in _END.finditer(hidden):
        piece = hidden[start : match.end()].rstrip()
        run_in = _RUN_IN.match(piece) and len(piece.split()) <= 7
        if not _NO_END.search(piece) and not run_in:
            found.append(piece)
            start = match.end()
    found.append(hidden[start:].strip())
    return [re.sub("\0(\\d+)\0", lambda m: kept[int(m[1])], piece) for piece in found if piece]


def formatted(text: str) -> str:
    r"""Return a page with one sentence per line.

    >>> print(formatted("One\nsentence. Another.\n\n- An item\n  of two. Lines.\n"), end="")
    One sentence.
    Another.
    <BLANKLINE>
    - An item of two.
      Lines.
    """
    out: list[str] = []
    paragraph: list[str] = []
    for line, prose in _lines(text):
        item = _ITEM.match(line) if prose else None
        if paragraph and (not prose or item):
            out += _folded(paragraph)
            paragraph = []
        if prose:
            paragraph.append(line)
        else:
            out.append(line)
    return "\n".join(out + _folded(paragraph)) + "\n"


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether it is prose."""
    fence = table = formula = False
    for line in text.splitlines():
        bare = line.strip()
        edge = bare.startswith("```") or bare == "$$" or bare.startswith("<!--")
        if bare.startswith("```") and not table:
            fence = not fence
        elif bare == "$$" and not fence:
            formula = not formula
        elif bare.startswith("<!-- table:"):
            table = True
        elif bare.startswith("<!-- end of table"):
            table = False
        yield line, not (fence or table or formula or edge or _KEPT.match(line))


def words(text: str) -> int:
    r"""Return the words of a page's running prose, without code, tables, formulas and headings. A
    formula or a piece of code in a sentence is one word.

    >>> words("# Title\n\nFive *words*: $a = b$ of prose.\n\n- [item](page.md)\n\n```\ncode\n```\n")
    6
    """
    lines = (_INLINE.sub("x", line) for line, prose in _lines(text) if prose)
    return sum(len(_WORD.findall(line)) for line in lines)


def _folded(paragraph: list[str]) -> list[str]:
    """Return the lines of a paragraph, one for each sentence."""
    if not paragraph:
        return []
    item = _ITEM.match(paragraph[0])
    first = item[0] if item else re.match(r"\s*", paragraph[0])[0]  # type: ignore[index]
    words = " ".join(line.strip() for line in paragraph)[len(first.strip()) :].strip()
    rest = " " * len(first)
    found = sentences(words)
    return [first + found[0], *(rest + each for each in found[1:])]


def pages() -> list[Path]:
    """Return all pages with prose."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def documentation() -> list[Path]:
    """Return the pages whose words are limited: README and those of the site."""
    return [path for path in pages() if path.name == "README.md" or ROOT / "docs" in path.parents]


def count(each: bool) -> int:
    """Print the words of all pages, and of each one; return 1 if they are over the limit."""
    found = {path: words(path.read_text(encoding="utf-8")) for path in documentation()}
    for path, number in found.items() if each else ():
        print(f"{number:6,}  {path.relative_to(ROOT)}")
    total = sum(found.values())
    print(f"{total:,} words of running prose in README.md and docs/; the limit is {LIMIT:,}.")
    return int(total > LIMIT)


def main(arguments: list[str] | None = None) -> int:
    """Check or correct all pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--words", action="store_true", help="print the words of each page")
    options = parser.parse_args(arguments)
    if options.words:
        return count(each=True)
    write = options.write
    wrong = 0
    for path in pages():
        text = path.read_text(encoding="utf-8")
        better = formatted(text)
        if text == better:
            continue
        wrong += 1
        if write:
            path.write_text(better, encoding="utf-8")
            continue
        lines = zip(text.splitlines(), better.splitlines())
        number, (has, should) = next((i, p) for i, p in enumerate(lines, 1) if p[0] != p[1])
        print(f"{path.relative_to(ROOT)}:{number}: not one sentence per line:\n  {has}\n  {should}")
    return 0 if write else max(min(wrong, 1), count(each=False))


if __name__ == "__main__":
    sys.exit(main())
