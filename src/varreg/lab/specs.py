"""Specs: names with options on the command line, `name:option=value,option=value`, or for a user's
own objects `package.module:name,option=value`.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from varreg.errors import VarregError


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a spec into its name and its options.

    Values are parsed as Python literals if possible, and are text otherwise.

    >>> parse("VRSGD:momentum=0.9,history=geometric,nesterov=True")
    ('VRSGD', {'momentum': 0.9, 'history': 'geometric', 'nesterov': True})
    """
    name, _, text = spec.partition(":")
    return name, parse_options(text, spec)


def parse_options(text: str, spec: str) -> dict[str, Any]:
    """Parse `option=value,option=value`. Errors name the spec, of which the text is a part."""
    options: dict[str, Any] = {}
    for part in filter(None, _split(text)):
        key, equals, value = part.partition("=")
        if not equals or not key.strip().isidentifier():
            raise VarregError(
                f"varreg: {spec!r} has {part!r} where option=value is expected, as in "
                "name:option=value,option=value."
            )
        if key.strip() in options:
            raise VarregError(f"varreg: {spec!r} gives {key.strip()} twice.")
        try:
            options[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            options[key.strip()] = value.strip()
    return options


def _split(text: str) -> list[str]:
    """Split at commas that are not within brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def spell(name: str, options: dict[str, Any]) -> str:
    """Write a name and its options as a spec: the inverse of `parse`.

    >>> spell("VRSGD", {"momentum": 0.9, "history": "geometric"})
    'VRSGD:momentum=0.9,history=geometric'
    """
    colon = "," if ":" in name else ":"
    return name + ("" if not options else colon + ",".join(f"{k}={v}" for k, v in options.items()))


def unknown_name(kind: str, name: str, known: Iterable[str]) -> VarregError:
    """Return an error that lists the known names, and suggests the nearest."""
    known = list(known)
    lower = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), lower, 1)
    hint = f" Did you mean {lower[near[0]]!r}?" if near else ""
    return VarregError(f"varreg: there is no {kind} {name!r}; there are: {', '.join(known)}.{hint}")


def import_name(module: str, name: str, hint: str = "") -> Any:
    """Import `name` from a module, which may be in the current folder, or from a file if the path
    ends in `.py`.
    """
    try:
        is_path = module.endswith(".py")
        imported = _import_file(Path(module)) if is_path else importlib.import_module(module)
    except Exception as error:  # whatever the user's module raises
        said = f"{type(error).__name__}: {error}"
        raise VarregError(f"varreg: {module}:{name} cannot be imported ({said}).{hint}") from error
    if not hasattr(imported, name):
        near = difflib.get_close_matches(name, vars(imported), 1)
        also = f" Did you mean {near[0]!r}?" if near else ""
        raise VarregError(f"varreg: module {module!r} has no function {name!r}.{also}")
    return getattr(imported, name)


def _import_file(path: Path) -> ModuleType:
    """Import a file by its path, once; modules beside it are found as if it were run."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"varreg_file_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickles and dataclasses look there
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def resolve(spec: str, argument: str) -> tuple[Any, dict[str, Any]]:
    """Import the object that `package.module:name,option=value` names; return the object and the
    options.

    `argument` is the name of the command line's argument, for errors.
    """
    module, _, rest = spec.partition(":")
    name, _, given = rest.partition(",")
    if not name.isidentifier() or not is_module(module):
        raise VarregError(
            f"varreg: {argument} must be package.module:name or path.py:name, as in "
            f"my_file:my_function; got {spec!r}."
        )
    hint = (
        f" Modules are looked for in this folder, {Path.cwd()}, and where Python has its packages."
    )
    return import_name(module, name, hint), parse_options(given, spec)


def is_module(text: str) -> bool:
    """Return whether a text names a module, or a file of Python.

    >>> is_module("my.module"), is_module("../mine.py"), is_module("a b")
    (True, True, False)
    """
    return text.endswith(".py") or all(part.isidentifier() for part in text.split("."))


def refuse_options(options: dict[str, Any], taker: str) -> None:
    """Raise a VarregError if options are given to something that takes none."""
    if options:
        raise VarregError(f"varreg: {taker} takes no options; got {', '.join(options)}.")


def call(function: Callable[..., Any], options: dict[str, Any], description: str) -> Any:
    """Call a user's function with options. If it does not take them, raise a VarregError that names
    the options that it takes.
    """
    signature = _signature(function)
    try:
        signature.bind(**options)
    except TypeError as error:
        named = [
            p
            for p in signature.parameters.values()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        takes = (
            ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in named)
            or "no options"
        )
        raise VarregError(f"varreg: {description}: {error}. It takes {takes}.") from None
    try:
        return function(**options)
    except Exception as error:
        if isinstance(error, VarregError):
            raise
        raise VarregError(
            f"varreg: {description} failed: {type(error).__name__}: {error}"
        ) from error


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature. For functions in C without one, return a signature that takes any
    option.
    """
    try:
        return inspect.signature(function)
    except ValueError:
        return inspect.signature(lambda **options: None)
