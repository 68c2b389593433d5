"""The diagonal Fisher: against its definition, one sample at a time."""

from __future__ import annotations

import copy
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import varreg
from varreg.noise import progress

C = 4
SIZES = (7, 5, 1, 6)  # of batches: they may differ


class Two(nn.Module):
    """Two inputs, a tied weight, a norm, a dropout, and a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, C)
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout(0.5)
        self.norm.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x, z=None):
        h = torch.tanh(self.a(x) if z is None else self.a(x) * z)
        return self.out(self.drop(self.norm(torch.tanh(self.b(torch.tanh(self.b(h)))))))


def model(seed: int = 0) -> Two:
    torch.manual_seed(seed)
    return Two().double()


def loader(sizes=SIZES):
    g = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 5, generator=g, dtype=torch.float64),
            torch.randint(0, C, (n,), generator=g),
        )
        for n in sizes
    ]


def squares(net: nn.Module, x, y) -> dict[str, torch.Tensor]:
    """g² of one sample."""
    names = {n: p for n, p in net.named_parameters() if p.requires_grad}
    inputs = x if isinstance(x, tuple) else (x,)
    value = F.cross_entropy(net(*inputs), y)
    grads = torch.autograd.grad(
        value, list(names.values()), materialize_grads=True, allow_unused=True
    )
    return {n: g.square() for n, g in zip(names, grads, strict=True)}


def definition(net: nn.Module, batches, kind: str, labels=None) -> dict[str, torch.Tensor]:
    """Each sample alone; for the exact kind, each label alone, weighted by its probability."""
    net = copy.deepcopy(net).eval()
    total, n = {}, 0
    for x, y in batches:
        for i in range(len(y)):
            one = tuple(t[i : i + 1] for t in x) if isinstance(x, tuple) else x[i : i + 1]
            p = net(*(one if isinstance(one, tuple) else (one,))).softmax(1)[0].detach()
            if kind == "exact":
                parts = [(p[c], torch.tensor([c])) for c in range(C)]
            else:
                parts = [(1.0, y[i : i + 1] if labels is None else labels[n : n + 1])]
            for w, label in parts:
                for name, g2 in squares(net, one, label).items():
                    total[name] = total.get(name, 0) + w * g2
            n += 1
    return {name: t / n for name, t in total.items()}


def assert_same(found, truth, rtol=1e-10):
    assert found.keys() == truth.keys()
    for name in truth:
        torch.testing.assert_close(found[name], truth[name], rtol=rtol, atol=1e-15, msg=name)


@pytest.mark.parametrize("kind", ["empirical", "exact"])
def test_against_the_definition(kind):
    net, data = model(), loader()
    found = varreg.fisher(net, data, kind)
    assert_same(found, definition(net, data, kind))
    assert "norm.bias" not in found
    assert not found["unused"].any()


def test_sampled_takes_labels_from_the_model():
    net, data = model(), loader()
    found = varreg.fisher(net, data, "sampled", generator=torch.Generator().manual_seed(3))
    g, drawn = torch.Generator().manual_seed(3), []
    for x, _ in data:
        drawn.append(torch.multinomial(net.eval()(x).softmax(1), 1, generator=g)[:, 0])
    assert_same(found, definition(net, data, "sampled", torch.cat(drawn)))


def test_sampled_has_the_exact_one_as_its_mean():
    net, data = model(), loader((64,))
    exact = varreg.fisher(net, data, "exact")["out.bias"]
    g = torch.Generator().manual_seed(0)
    draws = torch.stack(
        [varreg.fisher(net, data, "sampled", generator=g)["out.bias"] for _ in range(200)]
    )
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - exact).abs() < 5 * error).all()


def test_softmax_regression_has_a_closed_form():
    """F[c, j] = (1/N) Σ p_c (1 − p_c) x_j²."""
    torch.manual_seed(0)
    net = nn.Linear(5, C).double()
    data = loader()
    x = torch.cat([x for x, _ in data])
    p = net(x).softmax(1).detach()
    found = varreg.fisher(net, data, "exact")
    v = p * (1 - p)
    torch.testing.assert_close(found["weight"], v.t() @ x.square() / len(x), rtol=1e-11, atol=0)
    torch.testing.assert_close(found["bias"], v.mean(0), rtol=1e-11, atol=0)


def test_positions_of_a_sample_are_one_gradient():
    """Logits [samples, classes, positions]: a sample's gradient is that of all its positions."""
    torch.manual_seed(0)
    net = nn.Conv1d(3, C, 1).double()
    data = [(torch.randn(5, 3, 6).double(), torch.randint(0, C, (5, 6)))]
    found = varreg.fisher(net, data, "sampled", generator=torch.Generator().manual_seed(1))
    p = net(data[0][0]).softmax(1).movedim(1, -1)
    drawn = torch.multinomial(p.flatten(0, 1), 1, generator=torch.Generator().manual_seed(1))
    drawn = drawn.view(5, 6)
    rows = [squares(net, data[0][0][i : i + 1], drawn[i : i + 1]) for i in range(5)]
    assert_same(found, {n: torch.stack([r[n] for r in rows]).mean(0) for n in rows[0]})


@pytest.mark.filterwarnings("ignore")
def test_against_backpack():
    backpack = pytest.importorskip(
        "backpack",
        reason="BackPACK is not installed: pip install --no-deps backpack-for-pytorch",
    )
    from backpack.extensions import SumGradSquared

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, C)).double()
    (x, y) = loader((9,))[0]
    found = varreg.fisher(net, [(x, y)])
    extended = backpack.extend(copy.deepcopy(net))
    value = backpack.extend(nn.CrossEntropyLoss(reduction="sum"))(extended(x), y)
    with backpack.backpack(SumGradSquared()):
        value.backward()
    assert_same(found, {n: p.sum_grad_squared / 9 for n, p in extended.named_parameters()})


# ---- what users bring ----------------------------------------------------------------------------


def test_several_inputs_and_lists_and_dicts():
    net, data = model(), loader((4, 3))
    pairs = [((x, x[:, :1].exp()), y) for x, y in data]
    truth = definition(net, pairs, "empirical")
    assert_same(varreg.fisher(net, pairs), truth)
    assert_same(varreg.fisher(net, [[list(x), y] for x, y in pairs]), truth)
    assert_same(varreg.fisher(net, [({"x": a, "z": b}, y) for (a, b), y in pairs]), truth)


def test_a_data_loader_and_limits():
    net, data = model(), loader()
    x, y = (torch.cat(t) for t in zip(*data, strict=True))
    dl = DataLoader(TensorDataset(x, y), batch_size=8)
    assert_same(varreg.fisher(net, dl, samples=11), definition(net, [(x[:11], y[:11])], ""))
    assert_same(varreg.fisher(net, dl, batches=2), definition(net, [(x[:16], y[:16])], ""))
    assert_same(varreg.fisher(net, iter(dl), samples=999), definition(net, [(x, y)], ""))


def test_precision():
    net, data = model().float(), [(x.float(), y) for x, y in loader()]
    assert {t.dtype for t in varreg.fisher(net, data).values()} == {torch.float32}
    found = varreg.fisher(net, data, dtype=torch.float64)
    assert {t.dtype for t in found.values()} == {torch.float64}
    truth = definition(net.double(), [(x.double(), y) for x, y in data], "empirical")
    assert_same(found, truth, rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-24, 1e24])
def test_squares_out_of_the_range_of_float32(scale):
    """The gradient is in float32's range, its square is not."""
    torch.manual_seed(0)
    net = nn.Linear(5, 1)
    x, y = torch.randn(6, 5), torch.randn(6, 1)

    def loss(out, y):
        return (out * scale * y).mean()

    found = varreg.fisher(net, [(x, y), (x, y)], loss=loss, dtype=torch.float64)["weight"]
    truth = (scale * y * x).double().square().mean(0, keepdim=True)
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["empirical", "sampled", "exact"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_batch_that_is_not_finite_is_an_error_and_leaves_the_sums_alone(kind, bad):
    net, data = model(), loader()
    broken = data[1][0].clone()
    broken[2] = bad
    with varreg.FisherSums(net, kind) as sums:
        sums.update(*data[0])
        before = sums.diagonal()
        with pytest.raises(varreg.VarregError, match="finite"):
            sums.update(broken, data[1][1])
        assert_same(sums.diagonal(), before, rtol=0)
        sums.update(*data[1])
    if kind != "sampled":
        assert_same(sums.diagonal(), varreg.fisher(net, data[:2], kind))


def test_a_later_batch_that_ignores_targets_is_an_error():
    net, data = model(), loader()
    data[1][1][0] = -100
    with pytest.raises(varreg.VarregError, match="has weights, ignores some targets"):
        varreg.fisher(net, data)


def test_sums_that_overflow_are_an_error():
    net = nn.Linear(5, 1).float()
    data = [(torch.randn(6, 5, dtype=torch.float32), torch.ones(6, 1, dtype=torch.float32))]
    with pytest.raises(varreg.VarregError, match=r"too large for sums of torch\.float32"):
        varreg.fisher(net, data, loss=lambda out, y: (out * y * 1e24).mean())


def test_half_precision_is_summed_in_float32():
    net, data = model().bfloat16(), [(x.bfloat16(), y) for x, y in loader()]
    found = varreg.fisher(net, data)
    assert {t.dtype for t in found.values()} == {torch.float32}


# ---- the model stays as it was -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["empirical", "sampled", "exact"])
def test_the_model_is_untouched(kind):
    net, data = model().train(), loader()
    net.norm.eval()
    F.cross_entropy(net(data[0][0]), data[0][1]).backward()
    hooks = [(list(m._forward_hooks), list(m._forward_pre_hooks)) for m in net.modules()]
    grads = {n: p.grad for n, p in net.named_parameters()}
    values = {n: None if g is None else g.clone() for n, g in grads.items()}
    modes = [m.training for m in net.modules()]
    random = torch.get_rng_state()
    before = copy.deepcopy(net.state_dict())
    with torch.no_grad():  # as after training, in an evaluation
        varreg.fisher(net, data, kind, generator=torch.Generator().manual_seed(0))
    assert [m.training for m in net.modules()] == modes
    assert [(list(m._forward_hooks), list(m._forward_pre_hooks)) for m in net.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), random)
    for n, p in net.named_parameters():
        assert p.grad is grads[n]
        assert p.grad is None or torch.equal(p.grad, values[n])
        assert varreg.moments(p) is None
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_it_is_put_back_when_something_fails():
    net = model().train()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        varreg.fisher(net, [*loader((3,)), (torch.ones(2, 4).double(), torch.zeros(2).long())])
    assert net.training
    assert not net._forward_hooks
    assert all(p.grad is None for p in net.parameters())


def test_an_observed_model_keeps_its_moments():
    net, data = model().eval(), loader()
    truth = definition(net, data, "exact")
    observer = varreg.observe(net, groups=2)
    F.cross_entropy(net(data[0][0]), data[0][1]).backward()
    before = {n: varreg.moments(p) for n, p in net.named_parameters()}
    assert_same(varreg.fisher(net, data, "exact"), truth)
    for n, p in net.named_parameters():
        m = varreg.moments(p)
        assert (m is None) == (before[n] is None)
        assert m is None or (m.count == 7 and torch.equal(m.square, before[n].square))
    F.cross_entropy(net(data[1][0]), data[1][1]).backward()  # accumulation goes on
    assert varreg.moments(net.out.weight).count == 12
    observer.remove()
    assert varreg.moments(net.out.weight) is None


def test_a_compiled_model_runs_eagerly():
    net, data = model(), loader()
    truth = definition(net, data, "empirical")
    compiled = torch.compile(net, backend="eager")
    assert_same(varreg.fisher(compiled, data), {f"_orig_mod.{n}": t for n, t in truth.items()})
    net.compile(backend="eager")
    call = net._compiled_call_impl
    assert_same(varreg.fisher(net, data), truth)
    assert net._compiled_call_impl is call


# ---- interrupted and continued -------------------------------------------------------------------


class Interrupted:
    """A loader that is interrupted before batch `at`."""

    def __init__(self, batches, at):
        self.batches, self.at, self.given = batches, at, 0

    def __iter__(self):
        for i, batch in enumerate(self.batches):
            if i == self.at:
                raise KeyboardInterrupt
            yield batch


@pytest.mark.parametrize("kind", ["empirical", "sampled", "exact"])
def test_interrupted_and_continued(tmp_path, kind):
    net, data, path = model(), loader(), tmp_path / "fisher.pt"

    def draws():
        return torch.Generator().manual_seed(5)

    truth = varreg.fisher(net, data, kind, generator=draws())
    for at in (2, 3):
        with pytest.raises(KeyboardInterrupt):
            varreg.fisher(net, Interrupted(data, at), kind, generator=draws(), checkpoint=path)
        assert torch.load(path, weights_only=True)["batches"] == at
    assert [f.name for f in tmp_path.iterdir()] == ["fisher.pt"]
    found = varreg.fisher(net, data, kind, generator=draws(), checkpoint=path)
    assert_same(found, truth, rtol=0)
    assert_same(varreg.fisher(net, data, kind, checkpoint=path), truth, rtol=0)  # it is done


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    net, data, path = model(), loader(), tmp_path / "fisher.pt"
    varreg.fisher(net, data, checkpoint=path)
    with pytest.raises(varreg.VarregError, match="kind='exact', the checkpoint's are of 'empiri"):
        varreg.fisher(net, data, "exact", checkpoint=path)
    with torch.no_grad():
        net.out.bias += 0.1
    with pytest.raises(varreg.VarregError, match="other parameter values"):
        varreg.fisher(net, data, checkpoint=path)
    with pytest.raises(varreg.VarregError, match="other parameters"):
        varreg.fisher(nn.Linear(5, C).double(), data, checkpoint=path)
    with pytest.raises(varreg.VarregError, match="state_dict"):
        varreg.FisherSums(net).load_state_dict({"a": 1})


def test_parts_of_the_data_add_up():
    net, data = model(), loader()
    whole, parts = varreg.FisherSums(net), []
    for part in (data[:1], data[1:]):
        with varreg.FisherSums(net) as sums:
            for x, y in part:
                sums.update(x, y)
        parts.append(sums.state_dict())
    for state in parts:
        whole.merge(state)
    assert (whole.samples, whole.batches) == (sum(SIZES), len(SIZES))
    assert_same(whole.diagonal(), definition(net, data, "empirical"))


# ---- errors --------------------------------------------------------------------------------------


def regression():
    return nn.Linear(5, 1).double(), [(x, y.double()[:, None]) for x, y in loader()]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "true"}, "kind must be one of empirical, sampled, exact; got 'true'"),
        ({"data": []}, "at least one sample"),
        ({"data": [(torch.ones(0, 5).double(), torch.ones(0).long())]}, "at least one sample"),
        ({"data": [torch.ones(3, 5)]}, "a loader of pairs .x, y.; got Tensor"),
        ({"data": [(1, 2, 3)]}, "got tuple of 3"),
        ({"samples": 0}, "samples must be a whole number from 1 up; got 0"),
        ({"batches": True}, "batches must be"),
        ({"dtype": torch.float16}, "dtype must be"),
        ({"loss": "mean"}, "a loss to call"),
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "is a sum over them"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, r"it returned shape \(7,\)"),
        ({"loss": nn.CrossEntropyLoss(weight=torch.arange(1.0, 5).double())}, "it has weights"),
        (
            {"loss": nn.CrossEntropyLoss(label_smoothing=0.3), "kind": "exact"},
            "−log p.*without weights or smoothing",
        ),
        ({"loss": lambda o, y: o.mean() * torch.nan}, "a finite loss"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_what_is_refused(change, says):
    options = {"data": loader(), **change}
    net = model()
    with pytest.raises(varreg.VarregError, match=says):
        varreg.fisher(net, options.pop("data"), **options)
    assert net.training
    assert not net._forward_hooks


@pytest.mark.parametrize("kind", ["sampled", "exact"])
def test_labels_of_the_model_need_logits(kind):
    net, data = regression()
    with pytest.raises(varreg.VarregError, match=r"expects logits .* got shape \(7, 1\)"):
        varreg.fisher(net, data, kind, loss=F.mse_loss)
    with pytest.raises(varreg.VarregError, match="as for a regression"):
        varreg.fisher(
            model(), [(x, torch.randn(len(x), C)) for x, _ in loader()], kind, loss=F.mse_loss
        )
    both = nn.Module()
    both.inner, both.forward = model(), lambda x: (both.inner(x), x)
    with pytest.raises(varreg.VarregError, match="got tuple"):
        varreg.fisher(both, loader(), kind, loss=lambda o, y: F.cross_entropy(o[0], y))
    assert set(varreg.fisher(net, data, loss=F.mse_loss)) == {"weight", "bias"}


def test_exact_wants_one_label_for_a_sample():
    data = [(torch.randn(5, 3, 6).double(), torch.randint(0, C, (5, 6)))]
    with pytest.raises(varreg.VarregError, match="'sampled' or 'empirical'"):
        varreg.fisher(nn.Conv1d(3, C, 1).double(), data, "exact")


def test_a_gradient_that_is_not_measured_is_an_error():
    net = model()

    def loss(out, y):
        return F.cross_entropy(out, y) + net.unused.square().sum()

    with (
        pytest.warns(UserWarning, match="no moments"),
        pytest.raises(varreg.VarregError, match="'unused' has a gradient that was not measured"),
    ):
        varreg.fisher(net, loader(), loss=loss)


def test_nothing_to_train_and_no_module():
    with pytest.raises(varreg.VarregError, match="no parameter that requires"):
        varreg.fisher(nn.Linear(5, C).requires_grad_(False), loader())
    with pytest.raises(varreg.VarregError, match=r"expects a torch.nn.Module, got int"):
        varreg.fisher(3, loader())
    with pytest.raises(varreg.VarregError, match="in `with sums:`"):
        varreg.FisherSums(model()).update(*loader()[0])


# ---- progress ------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["tqdm", "rich"])
def test_a_bar_with_what_is_installed(capsys, monkeypatch, library):
    pytest.importorskip(library)
    if library == "rich":
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    varreg.fisher(model(), loader(), progress=True)
    said = "".join(capsys.readouterr())
    assert "Fisher, empirical" in said


def test_no_bar_where_there_is_no_terminal_or_no_library(capsys, monkeypatch):
    varreg.fisher(model(), loader())
    for name in ("tqdm.auto", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(varreg.VarregError, match="needs tqdm or rich"):
        varreg.fisher(model(), loader(), progress=True)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    varreg.fisher(model(), loader())
    assert capsys.readouterr() == ("", "")


def test_places_where_no_checkpoint_can_be(tmp_path):
    """Before a pass that may take hours, and whole files of others stay."""
    model, data = nn.Linear(2, 2), [(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))]
    for path in (tmp_path, tmp_path / "gone" / "fisher.pt"):
        with pytest.raises(varreg.VarregError, match="checkpoint must be a file in a folder"):
            varreg.fisher(model, data, checkpoint=path)
    mine = tmp_path / "mine.txt"
    mine.write_text("hello")
    with pytest.raises(varreg.VarregError, match=r"not a checkpoint of varreg\.fisher"):
        varreg.fisher(model, data, checkpoint=mine)
    assert mine.read_text() == "hello"


def test_a_loader_that_is_none():
    with pytest.raises(varreg.VarregError, match=r"expects a loader.*got NoneType"):
        varreg.fisher(nn.Linear(2, 2), None)
