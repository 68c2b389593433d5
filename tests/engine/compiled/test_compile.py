"""torch.compile of an observed model, and around it: the same numbers as without, or an error."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import varreg
from tests.support import model_table as models
from tests.support.measured import assert_moments
from tests.support.small_net import linear
from tests.support.truth import losses, one_at_a_time, sample_weights

CASES = {case.name: case for case in models.CASES}
NAMES = ["linear", "conv2d", "layer-norm", "gpt", "transformer", "lstm", "no-rule"]
BATCHES = [7, 7, 4, 7, 7, 4]  # the end of an epoch is a smaller batch
OPTIMIZERS = {
    "VRSGD": lambda p: varreg.VRSGD(p, lr=0.01, momentum=0.9),
    "VRAdamW": lambda p: varreg.VRAdamW(p, lr=0.01),
    "wrapped": lambda p: varreg.VarianceRegularized(torch.optim.RAdam(p, lr=0.01), per="tensor"),
}
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning"
)  # of torch's own compiler


@pytest.fixture(autouse=True)
def _afresh():
    dynamo = torch._dynamo
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


def setup(name, optimizer="VRSGD"):
    torch.manual_seed(0)
    model = CASES[name].make()
    varreg.observe(model)
    return model, OPTIMIZERS[optimizer](model.parameters())


def take(call, optimizer, inputs):
    """One training step."""
    optimizer.zero_grad()
    loss = losses(
        call(*inputs),
        sample_weights(len(inputs[0])).to(next(iter(optimizer.param_groups[0]["params"]))),
    ).mean()
    loss.backward()
    optimizer.step()
    return loss


def both(name, compiled, optimizer="VRSGD", rtol=1e-10):
    """Train compiled and eager, side by side; parameters, λ and history have to agree at every
    step.
    """
    model, ours = setup(name, optimizer)
    twin, theirs = setup(name, optimizer)
    step = compiled(model, ours)
    for size in BATCHES:
        inputs = tuple(t[:size] for t in CASES[name].inputs())
        step(inputs)
        take(twin, theirs, inputs)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=rtol, atol=rtol)
            assert varreg.moments(p).count == size
            torch.testing.assert_close(
                varreg.moments(p).square, varreg.moments(q).square, rtol=rtol, atol=rtol
            )
            # where the true gradient is 0, as of attention's key bias, λ is that of the rounding
            measured = varreg.moments(q).square > 1e-24
            torch.testing.assert_close(
                ours.lambda_of(p).expand_as(p)[measured],
                theirs.lambda_of(q).expand_as(q)[measured],
                rtol=100 * rtol,
                atol=100 * rtol,
            )
            for key in ("vr_history", "vr_count"):
                torch.testing.assert_close(
                    ours.state[p][key], theirs.state[q][key], rtol=100 * rtol, atol=100 * rtol
                )
    assert any(
        ours.lambda_of(p).std() > 0.01 if ours.lambda_of(p).dim() else ours.lambda_of(p) != 1
        for p in model.parameters()
    )


def breaks():
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("name", "backend"), [("linear", "eager"), *((name, "aot_eager") for name in NAMES)]
)
def test_a_compiled_model_trains_as_an_eager_one(name, backend):
    def compiled(model, optimizer):
        call = torch.compile(model, backend=backend)
        return lambda inputs: take(call, optimizer, inputs)

    both(name, compiled)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_compiled_in_place(optimizer):
    def compiled(model, optimizer):
        model.compile(backend="aot_eager")
        return lambda inputs: take(model, optimizer, inputs)

    both("linear", compiled, optimizer)


def test_a_compiled_part_of_an_observed_model():
    def compiled(model, optimizer):
        model[0].compile(backend="aot_eager")
        return lambda inputs: take(model, optimizer, inputs)

    both("linear", compiled)


@pytest.mark.slow
def test_a_whole_training_step_compiled():
    """zero_grad, forward, loss, backward and step() in one compiled function."""

    def compiled(model, optimizer):
        return torch.compile(lambda inputs: take(model, optimizer, inputs), backend="aot_eager")

    both("linear", compiled, "VRAdamW")


def test_a_compiled_step_of_the_optimizer():
    def compiled(model, optimizer):
        step = torch.compile(optimizer.step, backend="aot_eager")

        def run(inputs):
            optimizer.zero_grad()
            losses(model(*inputs), sample_weights(len(inputs[0]))).mean().backward()
            step()

        return run

    both("linear", compiled)


def test_a_compiled_function_in_an_observed_model():
    function = torch.compile(lambda x, w: torch.tanh(x @ w) * w.sum(0), backend="aot_eager")
    model, x, w = (
        models.Fn(lambda s, x: function(x, s.w), w=models.weight(4, 3)),
        torch.randn(6, 4),
        sample_weights(6),
    )
    g = one_at_a_time(copy.deepcopy(model), (x,), w)["w"]
    varreg.observe(model)
    losses(model(x), w).mean().backward()
    torch.testing.assert_close(
        varreg.moments(model.w).second_moment, g.square().mean(0), rtol=1e-10, atol=1e-10
    )


def count(call, *inputs):
    """Graphs and graph breaks of a forward and backward."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile(call, backend="aot_eager")(*inputs).sum().backward()
    return graphs(), breaks()


def test_an_observed_forward_is_in_the_graph():
    """The numbers of docs/reference/coverage.md: one graph, with an observer and without."""
    x = torch.randn(7, 4)
    model = CASES["linear"].make()
    assert count(model, x) == (1, 0)
    with varreg.observe(model):
        assert count(model, x) == (1, 0)
        assert count(lambda x: model(2 * x).square(), x) == (1, 0)
    assert count(model, x) == (1, 0)


def test_an_observed_forward_that_no_graph_holds_is_eager():
    """What surrounds it is compiled."""
    case = CASES["no-rule"]
    model, inputs = case.make(), case.inputs()
    varreg.observe(model)
    assert count(model, *inputs)[1] > 0
    model.zero_grad()
    assert count(lambda *inputs: model(*inputs).square(), *inputs)[0] > 0
    assert all(varreg.moments(p).count == len(inputs[0]) for p in model.parameters())


def test_fullgraph_raises_where_no_graph_holds_it_and_leaves_the_model_usable():
    model, optimizer = setup("no-rule")
    inputs = CASES["no-rule"].inputs()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Enter"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(*inputs)
    take(model, optimizer, inputs)
    assert all(varreg.moments(p).count == len(inputs[0]) for p in model.parameters())


@pytest.mark.parametrize("how", ["enabled", "configured"])
def test_compiled_autograd_raises_and_leaves_the_model_usable(how):
    model, optimizer = setup("linear")
    (x,) = CASES["linear"].inputs()
    backward = lambda: losses(model(x), sample_weights(7)).mean().backward()
    dynamo = torch._dynamo
    told = pytest.raises(RuntimeError, match=r"varreg: compiled autograd .* would not measure it")
    if how == "configured":
        with dynamo.config.patch(compiled_autograd=True), told:
            torch.compile(backward, backend="aot_eager")()
    else:
        with dynamo.compiled_autograd._enable(torch.compile(backend="eager")), told:
            backward()
    torch._dynamo.reset()
    take(model, optimizer, (x,))
    assert varreg.moments(model[0].weight).count == 7


def test_observe_after_compile_is_refused():
    for make in (
        lambda m: torch.compile(m),
        lambda m: nn.Sequential(torch.compile(m)),
        lambda m: (m[0].compile(), m)[1],
    ):
        with pytest.raises(
            ValueError,
            match=r"is compiled, and compiled code ignores the engine. Call observe\(\) first",
        ):
            varreg.observe(make(CASES["linear"].make()))


OLDER = """
import warnings, torch, varreg
model, x = torch.nn.Linear(3, 2), torch.randn(7, 3)
call = torch.compile(model, backend="eager")
call(x)
varreg.observe(model)
optimizer = varreg.VRSGD(model.parameters(), lr=0.1)
call(x).sum().backward()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimizer.step()
assert varreg.moments(model.weight) is None
assert "have a gradient but no gradient variance" in str(caught[0].message)
torch.compiler.reset()
optimizer.zero_grad()
call(x).sum().backward()
assert varreg.moments(model.weight).count == 7
"""


def test_compiled_code_from_before_observe_has_no_moments_and_is_told():
    """The model itself is not compiled here, so `observe` cannot know; the compiled code is older
    than the hooks, and does not call them.

    In a process of its own: what torch.compile did before, for other models, changes what it does
    here.
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", OLDER], check=True)


def test_an_observer_that_is_removed_leaves_compiled_code_without_it():
    model, inputs = CASES["linear"].make(), CASES["linear"].inputs()
    call = torch.compile(model, backend="aot_eager")
    observer = varreg.observe(model)
    call(*inputs).sum().backward()
    observer.remove()
    model.zero_grad()
    call(*inputs).sum().backward()
    assert varreg.moments(model[0].weight) is None
    with varreg.observe(model):
        torch._dynamo.reset()  # else the code from before goes on, as above
        model.zero_grad()
        call(*inputs).sum().backward()
        assert varreg.moments(model[0].weight).count == 7


def test_a_model_of_the_users_own_class_may_be_observed_after_it_ran_compiled():
    model, x = Net(), torch.randn(6, 4)
    call = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        call(x).sum().backward()
        assert varreg.moments(model.layer.weight) is None
        with varreg.observe(model):
            model.zero_grad()
            call(x).sum().backward()
            assert varreg.moments(model.layer.weight).count == 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x).tanh()


@pytest.mark.skipif(
    not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")),
    reason="inductor needs a C++ compiler",
)
def test_inductor():
    """The loss is compiled for real; in float32, whose sums it may take in another order."""
    torch.set_default_dtype(torch.float32)

    def compiled(model, optimizer):
        loss = torch.compile(
            lambda inputs: losses(model(*inputs), sample_weights(len(inputs[0])).float()).mean()
        )

        def run(inputs):
            optimizer.zero_grad()
            loss(inputs).backward()
            optimizer.step()

        return run

    both("linear", compiled, rtol=1e-5)
    assert graphs() > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_after_observe_gives_the_same_numbers():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), linear(27, 4)).double()
    x, w = torch.randn(6, 1, 5, 5), sample_weights(6)
    g = one_at_a_time(copy.deepcopy(model), (x,), w)
    varreg.observe(model)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        model.zero_grad()
        losses(compiled(x), w).mean().backward()
        assert_moments(model, g)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_step_in_a_hook(is_late):
    """The graph runs eagerly: its backward would read parameters after they have changed."""
    torch.manual_seed(0)
    model = CASES["linear"].make()
    inputs = CASES["linear"].inputs()
    weights = sample_weights(len(inputs[0]))
    truth = one_at_a_time(copy.deepcopy(model), inputs, weights)
    varreg.observe(model)
    call = torch.compile(model)
    if is_late:
        for _ in range(3):
            losses(call(*inputs), weights).mean().backward()
        model.zero_grad()

    def step(p):
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    losses(call(*inputs), weights).mean().backward()
    assert_moments(model, truth)
