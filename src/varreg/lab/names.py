"""Names on the command line: `name:option=value,option=value`, and what is said of a name that nobody knows."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """A name and its options; values are read as Python's where they are such, and are words otherwise.

    >>> parse("VRSGD:momentum=0.9,history=geometric,nesterov=True")
    ('VRSGD', {'momentum': 0.9, 'history': 'geometric', 'nesterov': True})
    """
    name, _, rest = text.partition(":")
    return name, options(rest, text)


def options(text: str, whole: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, _split(text)):
        key, equals, value = part.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ValueError(
                f"varreg: {whole!r} has {part!r} where option=value is expected, as in name:option=value,option=value."
            )
        if key.strip() in found:
            raise ValueError(f"varreg: {whole!r} gives {key.strip()} twice.")
        try:
            found[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            found[key.strip()] = value.strip()
    return found


def _split(text: str) -> list[str]:
    """At commas that are not within brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def spell(name: str, options: dict[str, Any]) -> str:
    """The inverse of `parse`.

    >>> spell("VRSGD", {"momentum": 0.9, "history": "geometric"})
    'VRSGD:momentum=0.9,history=geometric'
    """
    return name + ("" if not options else ":" + ",".join(f"{k}={v}" for k, v in options.items()))


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """An error that lists what there is, and names the nearest."""
    known = list(known)
    lower = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), lower, 1)
    hint = f" Did you mean {lower[near[0]]!r}?" if near else ""
    return ValueError(f"varreg: there is no {kind} {name!r}; there are: {', '.join(known)}.{hint}")


def imported(module: str, name: str, hint: str = "") -> Any:
    """What is called `name` in a module, which may lie in the folder where the command is given."""
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever the user's module raises
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"varreg: {module}:{name} cannot be imported ({said}).{hint}") from error
    if not hasattr(found, name):
        near = difflib.get_close_matches(name, vars(found), 1)
        also = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"varreg: module {module!r} has no function {name!r}.{also}")
    return getattr(found, name)


def own(spec: str, what: str) -> tuple[Any, dict[str, Any]]:
    """What `package.module:name,option=value` names, and the options."""
    module, _, rest = spec.partition(":")
    name, _, given = rest.partition(",")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"varreg: {what} must be package.module:name, as in my_file:my_function; got {spec!r}.")
    hint = f" Modules are looked for in this folder, {Path.cwd()}, and where Python has its packages."
    return imported(module, name, hint), options(given, spec)


def none(options: dict[str, Any], what: str) -> None:
    """Refuse options where nobody would take them."""
    if options:
        raise ValueError(f"varreg: {what} takes no options; got {', '.join(options)}.")


def call(function: Callable[..., Any], options: dict[str, Any], what: str) -> Any:
    """With options that it takes; else an error that says which it takes."""
    signature = _signature(function)
    try:
        signature.bind(**options)
    except TypeError as error:
        known = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        takes = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in known) or "no options"
        raise ValueError(f"varreg: {what}: {error}. It takes {takes}.") from None
    try:
        return function(**options)
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("varreg: "):
            raise
        raise ValueError(f"varreg: {what} failed: {type(error).__name__}: {error}") from error


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Some of those in C have none: these take what they take."""
    try:
        return inspect.signature(function)
    except ValueError:
        return inspect.signature(lambda **options: None)
