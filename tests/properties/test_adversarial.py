"""Every row of the table of adversarial cases comes out as the promise says: exact, or a refusal
that says where.
"""

from __future__ import annotations

import collections
import warnings

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.properties.adversarial import CASES, remove_global_hooks
from tests.support.judge import (
    COUNTED,
    NO_MOMENTS,
    OUTSIDE,
    Case,
    allowed,
    depths,
    has_name,
    judge,
    plain_steps,
    samples_meet,
)

ROWS = [
    pytest.param(case, batch, id=f"{case.family}/{case.name}-{batch}")
    for case in CASES
    for batch in case.batches
]


@pytest.fixture(autouse=True)
def _no_global_hooks():
    yield
    remove_global_hooks()


def says_whether_samples_meet(case) -> bool:
    """Return whether plain torch shows that an expectation is true: where a refusal is expected,
    samples meet; where exact moments are, they do not.
    """
    return case.use is None and case.truth == "alone" and case.expect != "either"


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("case", "batch"), ROWS)
def test_nothing_is_silent(case, batch):
    plain = plain_steps(case, batch)
    if batch == max(case.batches) and says_whether_samples_meet(case):
        assert samples_meet(case, plain[0]) == (case.expect == "refused"), "the table is wrong"
    outcome = judge(case, batch, plain)
    if outcome.kind not in allowed(case, batch):
        pytest.fail(f"expected {case.expect}, got {outcome}", pytrace=False)


# ---- the table
# --------------------------------------------------------------------------------------------------


def test_names_are_unique():
    names = collections.Counter((case.family, case.name) for case in CASES)
    assert not [name for name, count in names.items() if count > 1]
    assert all(case.batches for case in CASES)
    assert {case.expect for case in CASES} == {"exact", "refused", "either"}


# ---- the judge can say every word
# ------------------------------------------------------------------------------------


def judged(call, **options) -> str:
    """Return the outcome of a plain Linear that is called in this way."""
    make, inputs = (lambda: nn.Linear(3, 3)), (lambda batch: (torch.randn(batch, 3),))
    return str(judge(Case("a", "b", make, inputs, "exact", call=call, **options), 4))


def is_observed(model: nn.Module) -> bool:
    """Tell whether varreg is on; the judge's own truth comes from models without it."""
    return bool(model._forward_pre_hooks)


def fail(model, x, message):
    if is_observed(model):
        raise RuntimeError(message)
    return model(x)


def change(model, x, what):
    y = model(x)
    if is_observed(model):
        what(model, y)
    return y


def test_the_judge_says_exact():
    assert judged(lambda m, x: m(x)) == "exact"


def test_the_judge_says_refused_where_the_message_says_where():
    message = "varreg: 'weight' is not to be had.\nMore of it."
    assert judged(lambda m, x: fail(m, x, message)) == "refused: varreg: 'weight' is not to be had."
    assert judged(lambda m, x: fail(m, x, "varreg: the model itself (Linear) is odd")).startswith(
        "refused"
    )


def test_the_judge_says_crash_where_the_message_is_torch_s_or_says_nothing():
    assert judged(lambda m, x: fail(m, x, "shape '[4]' is invalid")).startswith(
        "crash: RuntimeError: shape"
    )
    assert judged(lambda m, x: fail(m, x, "varreg: something is odd")).startswith(
        "crash: names no module"
    )
    assert judged(lambda m, x: fail(m, x, "varreg: something is odd"), named=False).startswith(
        "refused"
    )


def test_the_judge_says_silent_where_samples_meet_out_of_sight():
    assert judged(lambda m, x: m(x).roll(1, 0)).startswith("silent: 'weight': mean: off by")


def test_the_judge_says_silent_where_moments_are_missing():
    assert (
        judged(lambda m, x: x @ m.weight + m.bias)
        == "silent: 'weight' has a gradient, no moments, and nothing was said"
    )


def out_of_forward(model, x):
    return x @ model.weight + model.bias


def test_the_judge_wants_the_warning_of_missing_moments_that_it_was_told_to_expect():
    told = judged(out_of_forward, warned=NO_MOMENTS)
    assert told.startswith("refused: by a warning: varreg: 'bias': there is a gradient")
    assert judged(out_of_forward, warned=OUTSIDE).startswith("silent: 'weight' has a gradient")


def test_the_judge_wants_the_warning_of_other_numbers_that_it_was_told_to_expect():
    def call(model, x):
        if is_observed(model):
            warnings.warn(f"varreg: 'weight' {OUTSIDE}", stacklevel=1)
        return model(x).roll(1, 0)

    assert judged(call, told=OUTSIDE).startswith("refused: by a warning: varreg: 'weight' was")
    assert judged(call, told=COUNTED).startswith("silent: 'weight': mean: off by")
    assert judged(call).startswith("silent: 'weight': mean: off by")


def test_a_name_is_found_as_a_whole():
    message = "varreg: 'fc.weight' and out.bias. More of 'w1', and of a."
    for name in ("fc.weight", "out.bias", "w1", "a", "More"):
        assert has_name(message, name)
    for name in ("weight", "fc", "fc.w", "out", "bias", "w", "w11", "re"):
        assert not has_name(message, name)


def test_the_judge_says_silent_where_an_output_differs():
    assert judged(lambda m, x: change(m, x, lambda m, y: y.data.add_(1e-3))).startswith(
        "silent: an output: off by"
    )


def test_the_judge_says_silent_where_a_gradient_differs():
    def hook(model, y):
        model.weight.register_hook(lambda g: g * 1.001)

    assert judged(lambda m, x: change(m, x, hook)).startswith("silent: 'weight'.grad: off by")


def test_the_judge_says_silent_where_a_mode_is_left_and_takes_it_off():
    class Left(TorchFunctionMode):
        pass

    before = depths()
    assert judged(lambda m, x: change(m, x, lambda m, y: Left().__enter__())).startswith(
        "silent: left on the stack of modes"
    )
    assert depths() == before


def test_the_judge_says_silent_where_a_second_round_differs():
    rounds = []

    def wrong_when_warm(model, y):
        rounds.append(1)
        if len(rounds) == 2:
            y.data.add_(1e-3)

    assert judged(lambda m, x: change(m, x, wrong_when_warm)).startswith("silent: an output")


def test_a_plain_failure_is_the_table_s():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        judged(lambda m, x: m(x[:, :2]))
