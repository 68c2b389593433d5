"""Put every sentence of the pages on a line of its own, so that a change shows what it changes.

    python -m tools.prose --check    name the first wrong line of each page
    python -m tools.prose --write    correct all pages

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


def main(arguments: list[str] | None = None) -> int:
    """Check or correct all pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    write = parser.parse_args(arguments).write
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
    return 0 if write else min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
