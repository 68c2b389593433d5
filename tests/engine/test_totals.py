"""Sums over elements alone: what clears, changes or reads gradients, and what takes the sums."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

import varreg
from varreg.engine.contribution import Outer
from varreg.engine.totals_ledger import TotalsLedger
from varreg.errors import MeasurementError
from varreg.noise import gauges


def net(dtype=torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batch(n: int = 8, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(
        dtype
    )


def backward(model: nn.Module, x: torch.Tensor, scale: float = 1.0) -> None:
    (model(x).sin().square().sum(1).mean() * scale).backward()


def pair(**options):
    """Return two equal models, the second with sums alone."""
    model = net(**options)
    other = copy.deepcopy(model)
    return model, varreg.observe(model), other, varreg.observe(other, per="model")


def assert_same(model, other, rtol: float = 1e-9) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        m, t = varreg.moments(p), varreg.moments(q)
        assert (m is None) == (t is None)
        if m is not None:
            assert isinstance(t, varreg.Totals)
            assert (m.count, m.elements) == (t.count, t.elements)
            for name in ("total_mean_square", "total_variance", "total_second_moment"):
                a, b = getattr(m, name).double(), getattr(t, name)
                torch.testing.assert_close(a, b, rtol=rtol, atol=1e-30)


@pytest.mark.parametrize("per", ["tensor", "model"])
def test_sums_of_each_tensor(per):
    model, other = net(), net()
    varreg.observe(model), varreg.observe(other, per=per)
    for _ in range(3):
        for m in (model, other):
            m.zero_grad()
            backward(m, batch())
        assert_same(model, other)


@pytest.mark.parametrize("to_none", [True, False])
def test_clearing_starts_anew(to_none):
    model, _, other, _ = pair()
    for n in (8, 5, 6):
        for m in (model, other):
            m.zero_grad(set_to_none=to_none)
            backward(m, batch(n))
            backward(m, batch(n + 1))
        assert_same(model, other)
    other.zero_grad(set_to_none=to_none)
    assert all(varreg.moments(p) is None for p in other.parameters())


def test_gradients_cleared_without_a_trace():
    model, _, other, _ = pair()
    for m in (model, other):
        backward(m, batch())
        for p in m.parameters():
            p.grad.data.zero_()
        backward(m, batch(5))
    assert_same(model, other)


def test_clipping_after_backward_leaves_them():
    model, _, other, _ = pair()
    for m in (model, other):
        backward(m, batch(), scale=1024.0)
        clip_grad_norm_(m.parameters(), 0.1)
    assert_same(model, other)


@pytest.mark.parametrize("untraced", [False, True])
def test_a_gradient_changed_between_micro_batches_is_refused(untraced):
    model = net()
    varreg.observe(model, per="model")
    backward(model, batch())
    grad = model[0].weight.grad
    (grad.data if untraced else grad).mul_(0.5)
    with pytest.raises(MeasurementError, match=r"'0\.weight' was changed"):
        backward(model, batch())


def _double(p: torch.Tensor) -> None:
    p.grad.mul_(2)


def test_gradients_from_before_and_hooks():
    model, other = net(), net()
    for m in (model, other):
        backward(m, batch(3))
        m[2].bias.register_hook(lambda g: 3 * g)
        m[2].weight.register_post_accumulate_grad_hook(_double)
    varreg.observe(model), varreg.observe(other, per="model")
    for _ in range(2):
        for m in (model, other):
            backward(m, batch())
        assert_same(model, other)


def test_a_gradient_from_outside_is_refused():
    model = net()
    varreg.observe(model, per="model")
    loss = model(batch()).square().mean() + model[0].weight.square().sum()
    with pytest.raises(MeasurementError, match="from outside"):
        loss.backward()


@pytest.mark.parametrize("is_first", [False, True])
def test_a_gradient_from_outside_is_found_at_once(is_first):
    """S shares its memory with p.grad where it can: not where torch adds another gradient."""
    model = net()
    varreg.observe(model, per="model")
    outside = sum(p.square().sum() for p in model.parameters())
    losses = model(batch()).sin().square().sum(1).mean()
    with pytest.raises(MeasurementError, match="from outside"):
        (outside + losses if is_first else losses + outside).backward()


def test_the_sum_is_compared_without_a_copy(monkeypatch):
    shared = []

    def end_check(ledger):
        shared.append(ledger.kept_total.data_ptr() in {p.grad.data_ptr() for p in parameters})
        end(ledger)

    end = TotalsLedger.end_check
    monkeypatch.setattr(TotalsLedger, "end_check", end_check)
    model = net()
    parameters = list(model.parameters())
    observer = varreg.observe(model, per="model")
    backward(model, batch())
    assert shared == [True] * 4
    assert all(ledger.kept_total is None for _, ledger in observer.parameters)


def test_a_sum_that_was_written_over_is_compared_later():
    """A hook writes to a gradient that has arrived, while backward runs: S, which shares its
    memory, is lost for the comparison. The next one has a copy.
    """
    model = net()
    observer = varreg.observe(model, per="model")
    last = model[2].weight
    (ledger,) = (ledger for p, ledger in observer.parameters if p is last)

    def write(*_):
        last.grad.mul_(1)

    model[1].register_full_backward_hook(write)
    for is_missed in (True, False):
        model.zero_grad()
        backward(model, batch())
        assert ledger.is_overwritten
        assert ledger.is_check_missed == is_missed


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_squares_beyond_float32(scale):
    model, _, other, _ = pair(dtype=torch.float32)
    for m in (model, other):
        for _ in range(2):
            m.zero_grad()
            backward(m, batch(dtype=torch.float32), scale=scale)
    assert_same(model, other, rtol=1e-4)


def test_bfloat16():
    model, _, other, _ = pair(dtype=torch.bfloat16)
    for m in (model, other):
        backward(m, batch(dtype=torch.bfloat16))
    assert_same(model, other, rtol=1e-3)


def test_shared_and_checkpointed_layers():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            x = self.layer(self.layer(x).tanh())
            return checkpoint(lambda y: self.other(y).sin(), x, use_reentrant=False)

    torch.manual_seed(0)
    model = Twice().double()
    other = copy.deepcopy(model)
    varreg.observe(model), varreg.observe(other, per="model")
    for _ in range(2):
        for m in (model, other):
            m.zero_grad()
            backward(m, batch())
        assert_same(model, other)


def test_what_needs_elements_says_so():
    model = net()
    observer = varreg.observe(model, per="model")
    backward(model, batch())
    m = varreg.moments(model[0].weight)
    for name in ("mean", "variance", "rho", "second_moment"):
        with pytest.raises(varreg.VarregError, match=rf"{name} has a value for each element"):
            getattr(m, name)
    assert "Totals(count=8, shape 5×6" in repr(m)
    with pytest.raises(varreg.VarregError, match="for each element"):
        gauges.gsnr([m])
    with pytest.raises(varreg.VarregError, match="for each element"):
        varreg.NoiseScale(observer, l1=True).update()


def test_options_that_make_no_sense():
    with pytest.raises(varreg.VarregError, match="per must be one of"):
        varreg.observe(net(), per="layer")
    with pytest.raises(varreg.VarregError, match="Leave groups out"):
        varreg.observe(net(), 4, per="model")


def test_noise_tools_agree():
    model, one, other, two = pair()
    a, b = varreg.NoiseScale(one), varreg.NoiseScale(two)
    for n in (8, 9, 10):
        for m, noise in ((model, a), (other, b)):
            m.zero_grad()
            backward(m, batch(n))
            noise.update()
    assert a.model.value == pytest.approx(b.model.value, rel=1e-9)
    first, second = one.summary().as_dict(), two.summary().as_dict()
    assert first == pytest.approx(second, rel=1e-9)
    parts = [[varreg.moments(p) for p in m.parameters()] for m in (model, other)]
    assert gauges.noise_scale(parts[0]) == pytest.approx(gauges.noise_scale(parts[1]), rel=1e-9)


def test_adascale_agrees():
    gains = []
    for per in ("element", "model"):
        model = net()
        varreg.observe(model, per=per)
        ada = varreg.AdaScale(torch.optim.SGD(model.parameters(), 0.1), base_batch=2)
        for n in (8, 9, 10):
            ada.zero_grad()
            backward(model, batch(n))
            ada.step()
        gains.append(ada.gain)
    assert gains[0] == pytest.approx(gains[1], rel=1e-9)


@pytest.mark.parametrize("per", ["tensor", "model"])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}]
)
@pytest.mark.parametrize("clip", [None, 0.01])
def test_sgd_with_one_lambda_agrees(per, options, clip):
    models = []
    for observed in ("element", per):
        model = net()
        varreg.observe(model, per=observed)
        optimizer = varreg.VRSGD(model.parameters(), lr=0.1, per=per, **options)
        for n in (8, 9, 10, 11):
            optimizer.zero_grad()
            backward(model, batch(n))
            if clip:
                clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        models.append(model)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_optimizers_that_need_elements_say_so():
    model = net()
    varreg.observe(model, per="model")
    backward(model, batch())
    with pytest.raises(varreg.VarregError, match=r"per='element' needs.*varreg\.observe\(model\)"):
        varreg.VRSGD(model.parameters(), lr=0.1).step()
    with pytest.raises(varreg.VarregError, match="divides each element"):
        varreg.VRAdam(model.parameters(), lr=0.1, per="model").step()
    clip_grad_value_(model.parameters(), 0.01)
    with pytest.raises(varreg.VarregError, match="element by element"):
        varreg.VRSGD(model.parameters(), lr=0.1, per="model").step()


def test_a_compiled_model():
    model, _, other, _ = pair()
    compiled = torch.compile(other, backend="aot_eager")
    for _ in range(2):
        for m, call in ((model, model), (other, compiled)):
            m.zero_grad()
            backward(call, batch())
        assert_same(model, other)


def test_several_processes_are_refused(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        with pytest.raises(varreg.VarregError, match="not supported in several processes"):
            varreg.observe(net(), per="model")
    finally:
        torch.distributed.destroy_process_group()


def rows(batch: int, dtype: torch.dtype) -> torch.Tensor:
    """Three rows for each sample, and so few that products of rows cost less than W."""
    return torch.randn(batch, 3, 40, generator=torch.Generator().manual_seed(batch)).to(dtype)


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20)).double()


WINDOWS = {
    "one row": (net, lambda turn: batch(8 + turn % 2)),
    "few rows": (wide, lambda turn: rows(5 + turn % 2, torch.float64)),
}


def train_side_by_side(name, change=lambda plain, model, other, turn: None):
    """Yield a model without varreg, one with moments, and one with sums, after each backward."""
    make, data = WINDOWS[name]
    plain, model, other = make(), make(), make()
    varreg.observe(model), varreg.observe(other, per="model")
    for turn in range(12):  # each parameter's gradient is compared with S in some, not in others
        for m in (plain, model, other):
            m.zero_grad()
        change(plain, model, other, turn)
        for m in (plain, model, other):
            m(data(turn)).sin().square().flatten(1).sum(1).mean().backward()
        yield plain, model, other


@pytest.mark.parametrize("name", WINDOWS)
def test_gradients_and_sums_where_torch_computes_the_gradient(name):
    for plain, model, other in train_side_by_side(name):
        assert_same(model, other)
        for p, q in zip(plain.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", WINDOWS)
def test_torch_computes_most_gradients_of_few_rows(name, monkeypatch):
    computed = []
    whole = Outer.total

    def noted(self):
        computed.append(self)
        return whole(self)

    monkeypatch.setattr(Outer, "total", noted)
    sizes = []
    for _ in train_side_by_side(name):
        sizes.append(len(computed))
        computed.clear()
    assert sizes[:2] == [2, 2]  # both weights, in the first window of each size of batch
    assert set(sizes[2:]) == {1}  # then only where a gradient is compared: one in each window


def test_torch_computes_the_gradient_that_a_hook_changes():
    def change(plain, model, other, turn):
        if turn == 4:
            for m in (plain, model, other):
                m[0].weight.register_hook(lambda g: 2 * g)

    for turn, (plain, model, other) in enumerate(train_side_by_side("one row", change)):
        assert_same(model, other)
        torch.testing.assert_close(plain[0].weight.grad, other[0].weight.grad)
        assert turn < 4 or other[0].weight._backward_hooks


@pytest.mark.parametrize("scale", [1e-14, 0.0])
def test_single_rows_with_squares_beyond_float32(scale):
    model, other = net(torch.float32), net(torch.float32)
    varreg.observe(model), varreg.observe(other, per="model")
    for _ in range(5):
        for m in (model, other):
            m.zero_grad()
            backward(m, batch(dtype=torch.float32), scale)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        a, b = varreg.moments(p).total_variance.double(), varreg.moments(q).total_variance
        torch.testing.assert_close(a, b, rtol=1e-4, atol=0.0)


def test_micro_batches_where_torch_computes_the_gradient():
    model, _, other, _ = pair()
    for turn in range(6):
        for m in (model, other):
            m.zero_grad()
            for k in range(3):
                backward(m, batch(8 + k + turn))
        assert_same(model, other)


def test_an_unseen_gradient_is_found_where_torch_computes_the_gradient():
    model = net()
    varreg.observe(model, per="model")

    def train() -> None:
        for turn in range(12):
            model.zero_grad()
            loss = model(batch()).sin().square().sum(1).mean()
            (loss + (turn > 3) * model[0].weight.square().sum()).backward()

    with pytest.raises(MeasurementError, match="outside"):
        train()
