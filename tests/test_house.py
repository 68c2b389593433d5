"""Rules of the source that a linter does not know."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import varreg
from varreg import thresholds
from varreg._torch import ATTRIBUTES
from varreg.native import contract

SOURCE = Path(varreg.__file__).parent
TREES = {p: ast.parse(p.read_text()) for p in sorted(SOURCE.rglob("*.py"))}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _dotted(node: ast.AST) -> str:
    """Return `torch.a.b` for an attribute of a module; "" for one of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def _private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of torch that a module imports, or takes from a module of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [_dotted(node)]
        for name in names:
            first, *rest = name.split(".")
            if first in ("torch", "nn", "F", "dist") and any(map(_is_private, rest)):
                yield name


def _our_names() -> set[str]:
    """Return all names that varreg itself defines, or that Python and NumPy have."""
    ours = {"_asdict", "_replace", "_fields_", "_exit", "_getframe", "_inst", "_rand"}
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Name):
                ours.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                ours |= {node.attr} if _dotted(node.value) in ("self", "cls") else set()
    return ours


@pytest.mark.parametrize("path", TREES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_private_functions_of_torch_are_named_in_one_module(path):
    if path.name != "_torch.py":
        allowed = {f"DistributedDataParallel.{name}" for name in ATTRIBUTES}
        assert set(_private_names(TREES[path])) - allowed == set()


def test_private_attributes_of_torch_are_listed_with_a_reason():
    ours = _our_names() - set(ATTRIBUTES)
    read = {
        node.attr
        for path, tree in TREES.items()
        if path.name != "_torch.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and _is_private(node.attr)
    }
    asked = {
        node.args[1].value
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr", "setattr")
        and isinstance(node.args[1], ast.Constant)
        and _is_private(node.args[1].value)
    }
    defined = {"_step_supports_amp_scaling"}  # a property of ours with torch's name
    assert (read | asked) - ours - set(ATTRIBUTES) == {"_top_saved_tensors_default_hooks"} & asked
    assert set(ATTRIBUTES) - read - asked - defined == set()


BESIDE = ("lab", "theory", "cli.py", "tensorboard.py", "thresholds.py")  # no part of the core
# The defaults and constants of torch's own functions, and of the method's.
NOT_TUNED = {
    ("engine/rules/normalization.py", 1e-5),
    ("engine/rules/normalization.py", 0.1),
    ("optim/nadam.py", 0.96),
    ("options.py", 0.99),
    ("histories.py", 0.99),
    ("optim/lambda_summary.py", 0.1),  # quantiles
    ("optim/lambda_summary.py", 0.9),
    ("engine/trace/trial/trial_values.py", 0.8),  # random values between 0.1 and 0.9
    ("engine/trace/trial/trial_values.py", 0.1),
    ("optim/whole_step.py", 1037),  # a step that is tried: elements, and options
    ("optim/whole_step.py", 0.1),
    ("optim/whole_step.py", 0.9),
    ("optim/whole_step.py", 0.01),
    ("native/layer_sums.py", 31),  # as many rows as an int32 counts
    ("native/torch_root.py", 256),  # flags of MKL
    ("native/torch_root.py", 1310720),
}


def test_thresholds_are_in_one_module():
    """What is no small whole number, or a power, is a threshold; positions and sizes are not."""
    found = set()
    for path, tree in TREES.items():
        name = path.relative_to(SOURCE)
        if name.parts[0] in BESIDE:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and type(node.value) in (int, float):
                value = abs(node.value)
                if value > 16 or (value not in (0.0, 0.5) and value != int(value)):
                    found.add((name.as_posix(), value))
    assert found == NOT_TUNED


# Numbers in C that are no thresholds: of the processor, of the format of numbers, of mathematics.
NOT_TUNED_IN_C = {
    ("kernels.c", "64"),  # bytes of a vector
    ("kernels.c", "32"),
    ("noise_sums.h", "23"),  # bits of a fraction
    ("noise_sums.h", "52"),
    ("noise_sums.h", "12582912.0"),  # for powers of two
    ("noise_sums.h", "6755399441055744.0"),
    ("noise_sums.h", "126.0"),
    ("noise_sums.h", "1022.0"),
    ("noise_sums.h", "1.5"),  # of Newton's method
    *(("noise_sums.h", f"{math.log(2) ** k / math.factorial(k):.17g}") for k in range(1, 14)),
    ("noise_sums.h", f"{4 / math.log(2):.16g}"),
    ("threads.c", "40"),  # arguments that the code spells out
    ("threads.c", "20"),
    ("threads.c", "30"),
    ("threads.c", "34"),  # a schedule, by OpenMP's number
}


def test_thresholds_of_native_code_are_in_the_same_module():
    """C gets them by their names, from the contract. A shift to the left makes a threshold, too."""
    found = set()
    for path in sorted((SOURCE / "native").glob("*.[ch]")):
        code = re.sub(r"/\*.*?\*/|\"[^\"\n]*\"|^#if.*?$", "", path.read_text(), flags=re.S | re.M)
        assert not re.search(r"\b1 << \d", code), path.name
        for number in re.findall(r"(?<![\w.])\d+(?:\.\d*)?(?:e-?\d+)?(?![\w.])", code):
            value = float(number)
            if value > 16 or (value not in (0.0, 0.5) and value != int(value)):
                found.add((path.name, number))
    assert found == NOT_TUNED_IN_C
    defined = contract.header()
    for name in contract.THRESHOLDS:
        assert f"#define {name} {getattr(thresholds, name)!r}\n" in defined


def test_the_core_reads_without_other_processes():
    """`varreg.parallel` is imported by its own files, and by the seam when there are several."""
    found = set()
    for path, tree in TREES.items():
        name = path.relative_to(SOURCE).as_posix()
        for node in ast.walk(tree):
            names = [alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name")]
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and any(
                f"{module}.{n}".startswith("varreg.parallel") for n in names
            ):
                found.add(name)
    ours = {n for n in found if n.startswith("parallel/")}
    assert found - ours == {"engine/processes.py", "distributed.py"}


# What a docstring of a function must not begin with. (Tasks of the lab are shown by theirs.)
NO_VERBS = """
A All An And Are As At Both By Could Does Each Every Flat For From Has Have How If Images In Is It
Its No Of On One Or Our Pairs Rows Sequences Some That The Their There These They This To Were What
When Where Whether Which Who Whose Why With Without Zero
"""


@pytest.mark.parametrize("path", TREES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_docstrings_of_functions_begin_with_a_verb(path):
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or node) == "Task":
            continue
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            first = text.split()[0].rstrip(",:;")
            is_word = first.isascii() and first.isalpha() and first[0].isupper()
            assert is_word, f"{node.name}: {text.splitlines()[0]}"
            assert first not in NO_VERBS.split(), f"{node.name}: {text.splitlines()[0]}"


def test_no_message_is_compared_by_its_prefix():
    assert not [p for p in TREES if 'startswith("varreg' in p.read_text()]
