"""Figures and pages, apart from any experiment."""

import io

import matplotlib as mpl

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
