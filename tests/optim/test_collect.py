"""Parameters at a step, and what was measured of them: accumulation, scalers, frozen and
unobserved parameters, changed gradients, gradients of zero.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import varreg
from tests.support import model_table as models
from tests.support.optimizer_table import RULES
from tests.support.trained_state import BATCH, make, same, statistics
from tests.support.truth import losses, one_at_a_time, sample_weights
from tests.support.update_rules import Reference


def pair(name: str, **options):
    """A model with its optimizer, and the reference on a twin."""
    rule, model = RULES[name], make()
    twin = copy.deepcopy(model)
    varreg.observe(model)
    arguments = {**rule.settings["plain"], **options}
    optimizer = rule.regularized(model.parameters(), **arguments)
    direct = optimizer.param_groups[0].get("variance") == "direct"
    return (
        model,
        optimizer,
        Reference(twin, rule.reference, {**rule.defaults, **arguments, "direct": direct}),
    )


def compare(model, reference, rtol=1e-9):
    for (n, p), q in zip(model.named_parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(
            p.detach(), q.detach(), rtol=rtol, atol=rtol, msg=lambda m, n=n: f"{n}: {m}"
        )


@pytest.mark.parametrize("split", [(3, 3), (1, 5), (4, 1, 1)])
@pytest.mark.parametrize("name", RULES)
def test_accumulation_equals_the_full_batch(name, split):
    model, optimizer, reference = pair(name)
    weights = sample_weights(BATCH)
    for _ in range(20):
        x = torch.randn(BATCH, 4)
        optimizer.zero_grad()
        for part, w in zip(x.split(split), weights.split(split), strict=True):
            (losses(model(part), w).sum() / BATCH).backward()
        optimizer.step()
        reference.step(one_at_a_time(reference.model, (x,), weights))
        compare(model, reference)


@pytest.mark.parametrize("name", RULES)
def test_grad_scaler_and_its_skipped_steps(name):
    """The scale changes on the way, and some steps overflow: those leave parameters and statistics
    as they were.
    """
    model, optimizer, reference = pair(name)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    weights, skipped = sample_weights(BATCH), 0
    for step in range(24):
        x = torch.randn(BATCH, 4)
        optimizer.zero_grad()
        loss = losses(model(x), weights).mean()
        before = statistics(optimizer)
        scaler.scale(loss * torch.inf if step % 5 == 4 else loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step % 5 == 4:
            assert same(before, statistics(optimizer))
            skipped += 1
        else:
            reference.step(one_at_a_time(reference.model, (x,), weights))
        compare(model, reference)
    assert skipped == 4
    assert scaler.get_scale() != 2.0**14


def test_grad_scaler_with_a_fused_base():
    model, _, reference = pair("Adam")
    optimizer = varreg.VRAdam(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    weights = sample_weights(BATCH)
    for _ in range(10):
        x = torch.randn(BATCH, 4)
        optimizer.zero_grad()
        scaler.scale(losses(model(x), weights).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        reference.step(one_at_a_time(reference.model, (x,), weights))
        compare(model, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_grad_scaler(dtype):
    """In half precision, as near to float32 as half precision is."""
    torch.set_default_dtype(torch.float32)
    results = []
    for half in (False, True):
        torch.manual_seed(0)
        model = make()
        varreg.observe(model)
        optimizer = varreg.VRSGD(
            model.parameters(), lr=0.05, momentum=0.9, history="geometric", per="tensor"
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=half):
                loss = model(torch.randn(BATCH, 4)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert (results[0] - results[1]).norm() < 0.03 * results[0].norm()


@pytest.mark.parametrize("name", RULES)
def test_frozen_then_unfrozen(name):
    model, optimizer, reference = pair(name)
    weights = sample_weights(BATCH)
    for step in range(20):
        for p in (*model[0].parameters(), *reference.model[0].parameters()):
            p.requires_grad_(step >= 6)
        x = torch.randn(BATCH, 4)
        optimizer.zero_grad()
        losses(model(x), weights).mean().backward()
        optimizer.step()
        if step < 6:
            assert (
                model[0].weight not in optimizer.state
                or "vr_history" not in optimizer.state[model[0].weight]
            )
        reference.step(one_at_a_time(reference.model, (x,), weights))
        compare(model, reference)


def test_one_lambda_for_the_model_also_when_parameters_join_late():
    model, optimizer, _ = pair("SGD", per="model", history="mean")
    for step in range(8):
        for p in model[0].parameters():
            p.requires_grad_(step >= 4)
        optimizer.zero_grad()
        model(torch.randn(BATCH, 4)).square().mean().backward()
        optimizer.step()
        assert (
            len({float(optimizer.lambda_of(p)) for p in model.parameters() if p.requires_grad}) == 1
        )
    assert {float(optimizer.state[p]["vr_count"]) for p in model.parameters()} == {8.0}


@pytest.mark.parametrize("name", RULES)
def test_a_step_left_out_by_the_user(name):
    model, optimizer, reference = pair(name)
    weights = sample_weights(BATCH)
    for step in range(20):
        x = torch.randn(BATCH, 4)
        optimizer.zero_grad()
        losses(model(x), weights).mean().backward()
        if step % 3:
            optimizer.step()
            reference.step(one_at_a_time(reference.model, (x,), weights))
        compare(model, reference)


@pytest.mark.parametrize("name", RULES)
def test_unobserved_parameters_take_the_plain_step_with_one_warning(name):
    rule, model = RULES[name], make()
    twin = copy.deepcopy(model)
    ours, theirs = (
        o(m.parameters(), **rule.settings["plain"])
        for o, m in ((rule.regularized, model), (rule.base, twin))
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            x = torch.randn(BATCH, 4)
            for m, o in ((model, ours), (twin, theirs)):
                o.zero_grad()
                m(x).square().mean().backward()
                o.step()
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )
    assert len(caught) == 1
    message = str(caught[0].message)
    assert (
        f"{rule.regularized.__name__} takes the plain step (λ = 1) for parameters that have a "
        "gradient but no gradient variance" in message
    )
    assert all(f"param_groups[0]['params'][{i}]" in message for i in range(4))
    assert caught[0].filename == __file__
    assert not statistics(ours)


def test_partly_observed():
    model = make()
    varreg.observe(model[0])
    optimizer = varreg.VRSGD(model.named_parameters(), lr=0.1)
    model(torch.randn(BATCH, 4)).square().mean().backward()
    with pytest.warns(UserWarning, match=r"They are: 2.weight \(3, 5\), 2.bias \(3,\)"):
        optimizer.step()
    assert optimizer.lambda_of(model[0].weight) is not None
    assert optimizer.lambda_of(model[2].weight) is None
    with pytest.raises(varreg.VarregError, match="lambda_of expects a parameter"):
        optimizer.lambda_of("0.weight")


def test_one_group_has_no_variance_and_says_so():
    model = make()
    varreg.observe(model, groups=1)
    optimizer = varreg.VRSGD(model.parameters(), lr=0.1)
    model(torch.randn(BATCH, 4)).square().mean().backward()
    with pytest.warns(UserWarning, match="not with groups=1"):
        optimizer.step()


OPTIMIZERS = {name: rule.regularized for name, rule in RULES.items()}


OPTIMIZERS["wrapped"] = lambda p, **o: varreg.VarianceRegularized(
    torch.optim.RAdam(p, lr=o.pop("lr")), **o
)


SCALED = {
    "scaled and unscaled": lambda model, c: [p.grad.div_(c) for p in model.parameters()],
    "clipped by norm": lambda model, c: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "clipped by value": lambda model, c: nn.utils.clip_grad_value_(model.parameters(), 0.02),
    "in a new tensor": lambda model, c: [
        setattr(p, "grad", p.grad / c) for p in model.parameters()
    ],
}


@pytest.mark.parametrize("change", SCALED.values(), ids=SCALED)
@pytest.mark.parametrize("name", ["SGD", "wrapped"])
def test_what_scales_a_gradient_leaves_lambda_alone(name, change):
    """With lr 0, so that all steps are at the same point: λ is the same with and without it. Their
    increments have no memory.
    """
    found = []
    for do in (None, change):
        torch.manual_seed(0)
        model = make()
        varreg.observe(model)
        optimizer = OPTIMIZERS[name](model.parameters(), lr=0.0)
        for step in range(6):
            c = 2.0 ** (4 * (step % 4)) if do else 1.0
            optimizer.zero_grad()
            (model(torch.randn(BATCH, 4)).square().mean() * c).backward()
            if do:
                do(model, c)
            optimizer.step()
        found.append([optimizer.lambda_of(p) for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("what", ["weight decay by hand", "noise"])
def test_what_is_added_to_a_gradient_does_not_blow_up_its_variance(what):
    """Where S is near 0, (g/S)² is anything; V must stay near that of the untouched gradient."""
    found = []
    for do in (False, True):
        torch.manual_seed(0)
        model = make()
        varreg.observe(model)
        optimizer = varreg.VRSGD(model.parameters(), lr=0.0, momentum=0.9)
        for _ in range(20):
            x = torch.randn(BATCH, 4)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            noise = [torch.randn_like(p) for p in model.parameters()]
            for p, e in zip(model.parameters(), noise, strict=True):
                if do:
                    p.grad.add_(p.detach() if what != "noise" else e, alpha=0.01)
            optimizer.step()
        found.append(
            torch.cat([optimizer.state[p]["vr_variance"].flatten() for p in model.parameters()])
        )
    ratio = found[1] / found[0]
    assert ratio.max() < 4
    assert ratio.median() == pytest.approx(1, abs=0.2)


def test_what_is_added_to_a_gradient_of_zeros():
    model = Linear(3)
    varreg.observe(model)
    optimizer = varreg.VRSGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]])).mean().backward()
    model.w.grad += 1.0
    optimizer.step()
    torch.testing.assert_close(
        optimizer.state[model.w]["vr_variance"], torch.tensor([1.0, 4.0, 9.0])
    )


def test_a_mask_over_a_gradient_is_no_reason_to_give_up():
    layer = nn.Linear(100, 10, bias=False)
    varreg.observe(layer)
    optimizer = varreg.VRSGD(layer.parameters(), lr=0.1)
    layer(torch.randn(BATCH, 100)).square().mean().backward()
    layer.weight.grad[:, 5:] = 0
    optimizer.step()
    assert optimizer.lambda_of(layer.weight) is not None


@pytest.mark.parametrize("decay", [0.0, 1e-8])
@pytest.mark.parametrize("name", RULES)
def test_rare_rows_are_not_diluted_by_weight_decay(name, decay):
    """An embedding's row that occurs every third step: at the others it has no gradient, and enters
    no history.
    """
    found = []
    for wd in (0.0, decay):
        torch.manual_seed(0)
        table = nn.Embedding(6, 3)
        varreg.observe(table)
        optimizer = RULES[name].regularized(table.parameters(), lr=1e-3, weight_decay=wd)
        counts = torch.zeros(6)
        for step in range(9):
            rows = torch.randint(0, 5, (8, 1))
            if step % 3 == 2:
                rows[:4] = 5
            counts += torch.bincount(rows.flatten(), minlength=6) > 0
            optimizer.zero_grad()
            (table(rows) * torch.randn(8, 1, 3)).square().mean().backward()
            optimizer.step()
        assert (optimizer.state[table.weight]["vr_count"].amax(1) <= counts).all()
        found.append(optimizer.lambda_of(table.weight))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("per", ["tensor", "model"])
@pytest.mark.parametrize("name", RULES)
def test_one_dead_element_does_not_switch_a_tensor_off(name, per):
    model = make()
    varreg.observe(model)
    optimizer = RULES[name].regularized(model.parameters(), lr=0.01, per=per)
    for step in range(5):
        x = torch.randn(BATCH * (1 + step % 3), 4)
        x[:, 0] = 0  # no gradient for the weights of this input, ever
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert optimizer.lambda_of(model[0].weight) != 1
    assert float(optimizer.state[model[0].weight]["vr_count"]) >= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_no_variance(dtype):
    """The same gradient for all samples: ρ is 0, not what rounding makes of it."""
    layer = nn.Linear(3, 4, dtype=dtype)
    varreg.observe(layer)
    optimizer = varreg.VRSGD(layer.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        (layer(torch.randn(100, 3, dtype=dtype)).mean() * (0.3 + 0.03 * step)).backward()
        optimizer.step()
        assert torch.equal(varreg.moments(layer.bias).variance, torch.zeros(4, dtype=dtype))
        assert torch.equal(optimizer.lambda_of(layer.bias), torch.ones(4, dtype=dtype))


def test_float32_and_float64_agree_on_adam():
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = make()
        x = torch.randn(32, 4)
        model, x = model.to(dtype), x.to(dtype)
        varreg.observe(model)
        optimizer = varreg.VRAdam(model.parameters(), lr=1e-3, betas=(0.9, 0.94), variance="direct")
        for _ in range(8):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        found.append(optimizer.lambda_of(model[0].weight).double())
    torch.testing.assert_close(found[0], found[1], rtol=0.1, atol=0.1)


def test_one_history_for_the_model_needs_the_same_options():
    model = make()
    varreg.observe(model)
    groups = [
        {"params": model[0].parameters(), "history": "geometric"},
        {"params": model[2].parameters(), "history": "mean"},
    ]
    optimizer = varreg.VRSGD(groups, lr=0.1, per="model")
    model(torch.randn(BATCH, 4)).square().mean().backward()
    with pytest.raises(
        ValueError,
        match="param groups with per='model' share one history, and must have the same history",
    ):
        optimizer.step()


def test_one_lambda_for_a_model_of_mixed_precision():
    model = nn.Sequential(
        nn.Linear(4, 5, dtype=torch.float32), models.Fn(lambda s, x: x.double()), nn.Linear(5, 3)
    )
    varreg.observe(model)
    optimizer = varreg.VRSGD(model.parameters(), lr=0.1, per="model", calibrate=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(BATCH, 4, dtype=torch.float32)).square().mean().backward()
        optimizer.step()
    assert optimizer.lambda_of(model[0].weight) == pytest.approx(
        float(optimizer.lambda_of(model[2].weight)), rel=1e-5
    )


def test_a_gradient_that_was_not_measured():
    """Written into p.grad by hand, after the measured one was cleared: its variance is not
    known.
    """
    model, optimizer, _ = pair("SGD")
    model(torch.randn(BATCH, 4)).square().mean().backward()
    optimizer.step()
    before, measured = statistics(optimizer), [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    for p, S in zip(model.parameters(), measured, strict=True):
        g = torch.randn_like(p)
        p.grad = g - (g * S).sum() / S.square().sum() * S
    with pytest.warns(UserWarning, match="do not replace the gradient after backward"):
        optimizer.step()
    assert same(before, statistics(optimizer))


@pytest.mark.parametrize("name", RULES)
def test_a_batch_of_one_is_a_plain_step(name):
    model, optimizer, _ = pair(name)
    for batch in (BATCH, 1, BATCH):
        optimizer.zero_grad()
        model(torch.randn(batch, 4)).square().mean().backward()
        before, x = statistics(optimizer), copy.deepcopy((model, optimizer))
        optimizer.step()
        if batch == 1:
            assert same(before, statistics(optimizer))
            assert optimizer.lambda_of(model[0].weight) is None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for p, q in zip(x[0].parameters(), model.parameters(), strict=True):
                    p.grad = q.grad.clone()
                x[1].step()  # a copy, not observed: the plain step
            assert all(
                torch.equal(p, q)
                for p, q in zip(x[0].parameters(), model.parameters(), strict=True)
            )


def test_batches_of_one_from_the_start():
    model, optimizer, _ = pair("SGD")
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(1, 4)).square().mean().backward()
        if step:
            optimizer.step()
        else:
            with pytest.warns(UserWarning, match="one sample has no variance"):
                optimizer.step()


class Linear(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.w = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return (self.w * x).sum(1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"form": "affine"},
        {"form": "sigmoid"},
        {"cap": 1.0},
        {"scale_free": False},
        {"per": "tensor"},
    ],
)
@pytest.mark.parametrize("history", ["sum", "mean", "ema", "geometric", "harmonic"])
@pytest.mark.parametrize("name", RULES)
def test_zero_gradients_are_not_a_problem(name, history, options):
    """Element 0: ḡ = 0 with v > 0. Element 1: all gradients 0. Element 2: all alike, v = 0. Then
    ordinary steps.
    """
    model = Linear(4)
    varreg.observe(model)
    optimizer = RULES[name].regularized(
        model.parameters(), lr=0.1, weight_decay=0, history=history, **options
    )
    for step in range(6):
        x = torch.randn(4, 4)
        if step in (0, 2):
            x[:, 0] = torch.tensor([1.0, -1.0, 2.0, -2.0])
            x[:, 1] = 0.0
            x[:, 2] = 3.0
        if step == 3:
            x[:] = 0.0
        optimizer.zero_grad()
        model(x).mean().backward()
        before = statistics(optimizer)
        optimizer.step()
        assert model.w.isfinite().all()
        assert all(v.isfinite().all() for v in statistics(optimizer).values())
        if step == 0 and options.get("per") != "tensor":
            lam = optimizer.lambda_of(model.w)
            assert lam[1] == 1
            assert model.w[1] == 1
        if step == 3:  # no gradient at all: nothing to learn from
            after = statistics(optimizer)
            assert all(
                torch.equal(before[k], after[k])
                for k in before
                if k[1] in ("vr_history", "vr_count")
            )
            assert torch.equal(
                optimizer.lambda_of(model.w), torch.ones(() if options.get("per") else 4)
            )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", RULES)
def test_a_gradient_that_is_not_finite_is_not_learned_from(name, bad):
    model = Linear(4)
    varreg.observe(model)
    optimizer = RULES[name].regularized(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(5, 4)
        if step == 1:
            x[2, 1] = bad
        optimizer.zero_grad()
        model(x).mean().backward()
        before = statistics(optimizer)
        optimizer.step()
        if step == 1:
            assert same(before, statistics(optimizer))
            assert optimizer.lambda_of(model.w) is None  # the caller can tell
    assert all(v.isfinite().all() for v in statistics(optimizer).values())


def test_a_parameter_of_no_elements_and_an_empty_batch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: initializing zero-element tensors
        model = nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 3))
    varreg.observe(model)
    optimizer = varreg.VRSGD(model.parameters(), lr=0.1)
    model(torch.randn(BATCH, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = statistics(optimizer)
    model(torch.randn(0, 4)).square().sum().backward()
    optimizer.step()
    assert same(before, statistics(optimizer))


def test_a_parameter_replaced_by_one_of_another_shape():
    model = Linear(4)
    varreg.observe(model)
    optimizer = varreg.VRSGD(model.parameters(), lr=0.1)
    model(torch.randn(5, 4)).mean().backward()
    grad = torch.zeros(3) + 1
    model.w.grad = None
    model.w.data = torch.ones(3)
    model.w.grad = grad
    with pytest.raises(
        ValueError, match=r"parameter 'w' has shape \(3,\), but moments of shape \(4,\)"
    ):
        optimizer.step()


def test_a_full_float64_run_with_groups_of_samples():
    """λ from the variance that eight groups estimate: the same code path, other moments."""
    model = make()
    varreg.observe(model, groups=3)
    optimizer = varreg.VRSGD(model.parameters(), lr=0.1)
    model(torch.randn(BATCH, 4)).square().mean().backward()
    m = varreg.moments(model[0].weight)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[model[0].weight]["vr_history"], m.rho)


def test_reduction_does_not_matter():
    results = []
    for reduction in ("mean", "sum"):
        torch.manual_seed(3)
        model = make()
        varreg.observe(model, reduction=reduction)
        optimizer = varreg.VRSGD(
            model.parameters(), lr=0.1 if reduction == "mean" else 0.1 / BATCH, momentum=0.9
        )
        for _ in range(5):
            optimizer.zero_grad()
            getattr(model(torch.randn(BATCH, 4)).square().mean(1), reduction)().backward()
            optimizer.step()
        results.append([optimizer.lambda_of(p) for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
