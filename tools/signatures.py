"""An extension of Griffe: it shows in the API reference what Griffe does not see in sources.

An optimizer of varreg takes torch's arguments and the regularizer's options, but its source lists
neither: its `__signature__` is computed when the class is created. Griffe reads only sources, so
this extension adds the signature.

Examples in docstrings have no fences, as doctest expects. Markdown would take their prompts for
quotations, so this extension puts fences around them.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

import varreg
from varreg.optim import REGULARIZED


class Signatures(griffe.Extension):
    """Gives each optimizer its computed signature, and a table of its parameters."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Add both to all optimizers of a package that was loaded."""
        if pkg.name != "varreg":
            return
        options = pkg["options.Options"]
        fence_examples(pkg)
        for cls in REGULARIZED.values():
            path = f"{cls.__module__}.{cls.__name__}".removeprefix("varreg.")
            add_constructor(pkg[path], cls, options)


def fence_examples(thing: griffe.Object) -> None:
    """Put fences around the examples in the docstrings of an object and of all its members."""
    if thing.docstring is not None:
        thing.docstring.value = fenced(thing.docstring.value)
    for member in thing.members.values():
        if isinstance(member, griffe.Object):  # not an alias, whose docstring belongs to another
            fence_examples(member)


def fenced(text: str) -> str:
    """Return a docstring with a fence around each example, without flags of doctest."""
    text = re.sub(r" *# doctest: .*", "", text)
    block = r"^( *)>>> .*(?:\n(?:\1 *\S.*|(?=\n\1>>> )))*"
    return re.sub(block, lambda m: f"{m[1]}```pycon\n{m[0]}\n{m[1]}```", text, flags=re.M)


def add_constructor(page: griffe.Class, cls: type, options: griffe.Class) -> None:
    """Add an `__init__` with the class's own signature and the docs of its parameters."""
    base = next(c for c in cls.__mro__ if c.__module__.startswith("torch.optim"))
    parameters, rows = [griffe.Parameter("self")], []
    for name, given in inspect.signature(cls).parameters.items():
        default = None if given.default is inspect.Parameter.empty else repr(given.default)
        kind = griffe.ParameterKind(given.kind.description)
        parameters.append(griffe.Parameter(name, kind=kind, default=default))
        annotation, text = None, f"As `torch.optim.{base.__name__}` has it."
        if name in options.members:
            option = options[name]
            annotation, text = option.annotation, " ".join(option.docstring.value.split())
        elif name == "variance":
            text = 'Of the increment: `"simplified"`, the paper\'s, or `"direct"`.'
        rows.append(
            griffe.DocstringParameter(name, description=text, annotation=annotation, value=default)
        )
    init = griffe.Function("__init__", parameters=griffe.Parameters(*parameters), parent=page)
    init.docstring = griffe.Docstring("Args: see the table.", parent=init)
    init.docstring.__dict__["parsed"] = [griffe.DocstringSectionParameters(rows)]
    page.set_member("__init__", init)


assert varreg.__version__  # the package is imported, so that classes are made
