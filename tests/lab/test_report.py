"""Figures and pages, apart from any experiment."""

import io
import re
from pathlib import Path

import matplotlib as mpl
import pytest

from varreg.lab.report import builder
from varreg.lab.report.document import png, svg
from varreg.lab.report.style import STYLE, new_figure, save


def powers():
    with mpl.rc_context(STYLE):
        figure, (axes,) = new_figure(1)
        axes.loglog([1, 10, 100000], [1e-6, 1, 30])
    return figure


def test_labels_of_logarithmic_axes_are_plain_numbers():
    text = svg(powers(), "powers")
    assert "mathdefault" not in text
    assert ">10⁻⁶<" in text
    assert ">100<" in text
    assert png(powers())[:4] == b"\x89PNG"


def test_a_short_logarithmic_axis_is_labelled_between_its_powers():
    with mpl.rc_context(STYLE):
        figure, (axes,) = new_figure(1)
        axes.semilogy([0, 1], [2, 6])
    file = io.StringIO()
    save(figure, file, format="svg")
    assert ">3<" in file.getvalue()


def luminance(color: str) -> float:
    """Return the relative luminance of `#rrggbb`, as the W3C defines it."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(scheme):
    template = (Path(builder.__file__).parent / "templates" / "report.html").read_text()
    schemes = re.findall(r":root \{(.*?)\}", template)
    colors = dict(re.findall(r"--(\w+): (#\w{6});", schemes[scheme == "dark"]))
    for words in ("ink", "soft", "good", "bad", "same"):
        for behind in ("page", "card", "note"):
            low, high = sorted(luminance(colors[name]) for name in (words, behind))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (words, behind)  # the W3C's AA
