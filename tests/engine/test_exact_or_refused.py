"""Ways in which a number could be silently wrong: each is exact, or an error."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import varreg
from tests.support.measured import assert_moments, prepared, run, truth_of
from tests.support.model_table import BATCH, Case, Fn, ids, normal, weight
from tests.support.truth import losses, one_at_a_time, sample_weights
from varreg.engine.trace.layout import Owners, Ragged
from varreg.engine.trace.trial.trial_values import samples_in


def linear(i=3, o=3):
    return nn.Linear(i, o)


def dispatched(s, x):
    """Samples are sorted, served, and put back."""
    order = torch.arange(x.shape[0]).flip(0)
    y = s.a(x).index_select(0, order)
    return s.b(y).index_select(0, order)


def filled(s, x):
    """Time steps are written into a buffer whose first dimension is time."""
    out = torch.zeros(x.shape[1], x.shape[0], 3)
    for t in range(x.shape[1]):
        out[t] = x[:, t]
    return s.l(out).transpose(0, 1)


def reentrant(s, x):
    """One module is checkpointed twice, with the batch in different places."""

    def ck(h):
        return checkpoint(s.k, h, use_reentrant=True)

    return ck(ck(s.l(x)).transpose(0, 1)).transpose(0, 1)


EXACT = [
    Case(
        "positions-as-many-as-samples-expanded",
        lambda: Fn(
            lambda s, x: x[:, None] * s.q.expand(BATCH, -1) * torch.arange(1.0, BATCH + 1)[:, None],
            q=weight(1, 3),
        ),
        normal(3),
    ),
    Case(
        "expanded-over-another-dimension",
        lambda: Fn(
            lambda s, x: (
                s.l(x.expand(BATCH, *x.shape)) * torch.arange(1.0, BATCH + 1)[:, None, None]
            ).transpose(0, 1),
            l=linear(),
        ),
        normal(3),
    ),
    Case(
        "repeated-over-another-dimension",
        lambda: Fn(
            lambda s, x: (
                s.l(x.repeat(BATCH, 1, 1)) * torch.arange(1.0, BATCH + 1)[:, None, None]
            ).transpose(0, 1),
            l=linear(),
        ),
        normal(3),
    ),
    Case("written-time-first", lambda: Fn(filled, l=linear()), normal(BATCH, 3)),
    Case(
        "cell-folded",
        lambda: Fn(lambda s, x: s.r(x.flatten(0, 1)).view(x.shape), r=nn.GRUCell(3, 3)),
        normal(5, 3),
    ),
    Case(
        "lstm-folded",
        lambda: Fn(
            lambda s, x: s.r(x.flatten(0, 1))[0].view(x.shape), r=nn.LSTM(3, 3, batch_first=True)
        ),
        normal(2, 5, 3),
    ),
    Case(
        "bags-folded",
        lambda: Fn(
            lambda s, i: s.l(s.e(i.flatten(0, 1))).view(len(i), -1),
            e=nn.EmbeddingBag(7, 3),
            l=linear(3, 1),
        ),
        ids(2, 4, high=7),
    ),
    Case(
        "bilinear-with-a-parameter",
        lambda: Fn(
            lambda s, x: s.b(x, s.q * torch.ones(len(x), 1)), b=nn.Bilinear(3, 3, 2), q=weight(1, 3)
        ),
        normal(3),
    ),
    Case(
        "batched-weights",
        lambda: Fn(
            lambda s, x: torch.bmm(x, (s.a @ s.b).expand(len(x), -1, -1)),
            a=weight(3, 2),
            b=weight(2, 4),
        ),
        normal(5, 3),
    ),
    Case(
        "detached-parameter",
        lambda: Fn(
            lambda s, x: s.l(x) * s.p.detach() + F.linear(x, s.l.weight.data),
            l=linear(),
            p=weight(3),
        ),
        normal(3),
    ),
    Case(
        "constants-like-the-input",
        lambda: Fn(
            lambda s, x: s.l(x * s.pe.to(x) + s.pe.type_as(x) @ x.new_ones(3, 3).tril()),
            l=linear(),
            pe=weight(3),
        ),
        normal(3),
    ),
    Case(
        "ids-time-first",
        lambda: Fn(lambda s, i: s.l(s.e(i.t())).transpose(0, 1), e=nn.Embedding(7, 3), l=linear()),
        ids(5, high=7),
    ),
    Case(
        "keyword-arguments",
        lambda: Fn(
            lambda s, x: torch.layer_norm(
                torch.mm(x, mat2=s.w), (3,), s.g, s.b, 1e-5, cudnn_enable=False
            ),
            w=weight(3, 3),
            g=weight(3),
            b=weight(3),
        ),
        normal(3),
    ),
    Case(
        "in-place-with-a-parameter",
        lambda: Fn(
            lambda s, x: s.l(x).addcmul_(s.p, s.p).lerp_(s.p, 0.3).masked_fill_(x > 1, 0.5),
            l=linear(),
            p=weight(3),
        ),
        normal(3),
    ),
    Case(
        "lookup-changed-in-place",
        lambda: Fn(
            lambda s, i: s.e(i) + s.p(torch.arange(5)).mul_(2.0),
            e=nn.Embedding(7, 3),
            p=nn.Embedding(9, 3),
        ),
        ids(5, high=7),
    ),
    Case(
        "flipped-and-back",
        lambda: Fn(lambda s, x: s.l(s.l(x).flip(0).tanh()).flip(0), l=linear()),
        normal(3),
    ),
    Case("sorted-and-put-back", lambda: Fn(dispatched, a=linear(), b=linear()), normal(3)),
    Case("reentrant-two-layouts", lambda: Fn(reentrant, l=linear(), k=linear()), normal(BATCH, 3)),
    Case(
        "one-sample-anywhere",
        lambda: Fn(
            lambda s, x: s.k(x.t().unsqueeze(0).permute(2, 0, 1).squeeze(1)), k=linear(4, 2)
        ),
        normal(4),
    ),
]


@pytest.mark.parametrize("batch", [BATCH, 1, 2])
@pytest.mark.parametrize("case", EXACT, ids=lambda c: c.name)
def test_exact(case, batch):
    model, inputs, weights = prepared(case)
    inputs, weights = tuple(t[:batch] for t in inputs), weights[:batch]
    if batch != BATCH and case.name.startswith(("positions", "expanded", "repeated", "reentrant")):
        pytest.skip("the sizes are made for the full batch")
    plain = copy.deepcopy(model)
    g = truth_of(case, model, inputs, weights)
    varreg.observe(model)
    run(model, inputs, weights)
    run(plain, inputs, weights)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)
    assert_moments(model, g)


MIXED = {
    "attention that is not batch first": (
        lambda: Fn(
            lambda s, x: s.l(s.a(x, x, x, need_weights=False)[0]),
            a=nn.MultiheadAttention(3, 1),
            l=linear(),
        ),
        (5, 3),
    ),
    "a transformer that is not batch first": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0),
        (5, 4),
    ),
    "flip": (lambda: Fn(lambda s, x: s.l(s.l(x).flip(0).tanh()), l=linear()), (3,)),
    "roll": (lambda: Fn(lambda s, x: s.l(s.l(x).roll(1, 0)), l=linear()), (3,)),
    "sorted and not put back": (
        lambda: Fn(lambda s, x: s.l(x[x[:, 0].argsort()]), l=linear()),
        (3,),
    ),
    "normalized over the batch": (
        lambda: Fn(lambda s, x: s.k(F.normalize(s.l(x), dim=0)), l=linear(), k=linear()),
        (3,),
    ),
    "normalized over the batch at the end": (
        lambda: Fn(lambda s, x: F.normalize(s.l(x), dim=0), l=linear()),
        (3,),
    ),
    "softmin over the batch": (lambda: Fn(lambda s, x: F.softmin(s.l(x), dim=0), l=linear()), (3,)),
    "distances between samples": (
        lambda: Fn(lambda s, x: torch.cdist(s.l(x), s.l(x)), l=linear()),
        (3,),
    ),
    "cumulative maximum": (
        lambda: Fn(lambda s, x: torch.logcumsumexp(s.l(x), 0), l=linear()),
        (3,),
    ),
    "batch norm by another name": (
        lambda: Fn(
            lambda s, x: torch.batch_norm(s.l(x), None, None, None, None, True, 0.1, 1e-5, False),
            l=linear(),
        ),
        (3,),
    ),
    "layer norm over the batch": (
        lambda: Fn(lambda s, x: F.layer_norm(s.l(x).t(), (BATCH,)).t(), l=linear()),
        (3,),
    ),
    "the mean of the batch, subtracted": (
        lambda: Fn(lambda s, x: (h := s.l(x)) - h.mean(0), l=linear()),
        (3,),
    ),
    "covariances over the batch": (
        lambda: Fn(lambda s, x: (h := s.l(x)).t() @ h, l=linear()),
        (3,),
    ),
    "similarities between samples": (
        lambda: Fn(lambda s, x: torch.einsum("bi,ci->bc", h := s.l(x), h), l=linear()),
        (3,),
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_samples_that_are_mixed_or_moved_are_refused(name):
    make, shape = MIXED[name]
    model = make().double()
    varreg.observe(model)
    with pytest.raises((ValueError, RuntimeError), match=r"varreg: .*(sample|batch)"):
        losses(model(torch.randn(BATCH, *shape)), sample_weights(BATCH)).mean().backward()


def test_samples_may_meet_if_contributions_are_asked_for():
    model = Fn(lambda s, x: F.normalize(s.l(x), dim=0), l=linear()).double()
    varreg.observe(model, batch_norm="contribution")
    model(torch.randn(BATCH, 3)).square().sum().backward()
    m = varreg.moments(model.l.weight)
    assert m.count == BATCH
    torch.testing.assert_close(m.total, model.l.weight.grad)


def test_a_tensor_of_parameters_changed_in_place_is_refused():
    def forward(s, x):
        h = torch.zeros(len(x), 3) + s.p
        h.add_(s.l(x))
        return h * s.k(x)

    model = Fn(forward, p=weight(3), l=linear(), k=linear()).double()
    varreg.observe(model)
    with pytest.raises(ValueError, match="'p' but a tensor made of parameters is changed in place"):
        model(torch.randn(4, 3))


def test_several_forwards_and_separate_backwards():
    model = linear(3, 2).double()
    varreg.observe(model)
    x1, x2, x3 = torch.randn(3, 4, 3)
    a, b, c = model(x1), model(x2), model(x3)
    a.square().sum().backward()
    model.zero_grad()
    pair = Fn(lambda s, x, y: torch.cat([s.m(x), s.m(y)], 1), m=copy.deepcopy(model))
    w = sample_weights(4)
    g = one_at_a_time(pair, (x2, x3), w)
    losses(torch.cat([b, c], 1), w).mean().backward()
    assert_moments(model, {n.removeprefix("m."): v for n, v in g.items()})


@pytest.mark.parametrize(
    "clear",
    [
        lambda p: p.grad.data.zero_(),
        lambda p: p.grad.numpy().fill(0),
        lambda p: setattr(p, "grad", torch.empty_like(p).zero_()),
        lambda p: setattr(p, "grad", p.grad.clone().zero_()),
    ],
    ids=["data", "numpy", "new", "clone"],
)
def test_zeros_by_the_back_door_clear_too(clear):
    model = linear().double()
    varreg.observe(model)
    for _ in range(2):
        model(torch.randn(4, 3)).square().mean().backward()
        assert varreg.moments(model.weight).count == 4
        for p in model.parameters():
            clear(p)


def test_methods_that_count_different_batches_are_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.d = linear(), linear()

        def step(self, x):
            return self.d(self.e(x.flatten(0, 1)).view(x.shape).tanh())

    model = Model().double()
    varreg.observe(model)
    outside = pytest.warns(UserWarning, match=r"'e' \(Linear\) was called outside")
    with (
        outside,
        pytest.raises(
            RuntimeError, match="used for 20 samples, and another parameter or use for 4"
        ),
    ):
        model.step(torch.randn(4, 5, 3)).square().mean().backward()


def test_a_micro_batch_that_does_not_reach_a_parameter_counts():
    model = nn.ModuleDict({"trunk": linear(), "a": linear(), "b": linear()}).double()
    whole = Fn(lambda s, x, head: s.m[head](s.m["trunk"](x)), m=model)
    varreg.observe(whole)
    x = torch.randn(8, 3)
    (whole(x[:4], "a").square().sum() / 8).backward()
    (whole(x[4:], "b").square().sum() / 8).backward()
    assert varreg.moments(model["trunk"].weight).count == 8
    assert varreg.moments(model["a"].weight).count == 8
    assert (
        varreg.moments(model["b"].weight).count == 8
    )  # also those that passed it by before its first use


def test_a_penalty_that_starts_later_is_noticed():
    model = nn.Sequential(linear(), linear()).double()
    varreg.observe(model)

    def step(penalty):
        model.zero_grad()
        (
            model(torch.randn(4, 3)).square().mean() + penalty * model[1].weight.square().sum()
        ).backward()

    for _ in range(5):
        step(0.0)
    with pytest.raises(RuntimeError, match=r"'1\.weight' received a gradient from outside"):
        [step(1.0) for _ in range(4)]


def test_an_interrupted_forward_leaves_nothing_behind():
    model = nn.Sequential(linear(), linear()).double()
    observer = varreg.observe(model)

    def stop(*_):
        raise KeyboardInterrupt

    handle = model[1].register_forward_pre_hook(stop)
    x, w = torch.randn(4, 3), sample_weights(4)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()
    g = one_at_a_time(copy.deepcopy(model), (x,), w)
    losses(model(x), w).mean().backward()
    assert_moments(model, g)
    handle = model[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    observer.remove()
    assert not torch.overrides._get_current_function_mode_stack()


def test_tensors_kept_by_the_user_can_be_saved_and_loaded():
    kept = []
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    model[0].register_forward_hook(lambda m, a, out: kept.append(out.detach()))
    varreg.observe(model)
    model(torch.randn(4, 3))
    torch.save(kept[0], file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), kept[0])


def test_a_buffer_that_forward_updates():
    def forward(s, x):
        s.c.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return s.l(x)

    model = Fn(forward, l=linear()).double()
    model.register_buffer("c", torch.zeros(3))
    varreg.observe(model)
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        assert varreg.moments(model.l.weight).count == 4


def test_an_evaluation_thread_beside_the_training_thread():
    model = nn.Sequential(linear(), nn.Tanh(), linear()).double()
    x, w = torch.randn(6, 3), sample_weights(6)
    g = one_at_a_time(copy.deepcopy(model), (x,), w)
    varreg.observe(model)
    done = threading.Event()

    def evaluate():
        while not done.is_set():
            with torch.no_grad():
                model(torch.randn(5, 3, dtype=torch.float64))

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        for _ in range(100):
            model.zero_grad()
            losses(model(x), w).mean().backward()
            assert_moments(model, g)
    finally:
        done.set()
        thread.join()


def test_an_observed_model_inside_of_another():
    inner = linear().double()
    outer = Fn(
        lambda s, x: s.k(s.inner[0](s.l(x)).transpose(0, 1)).transpose(0, 1), l=linear(), k=linear()
    ).double()
    outer.inner = [inner]  # not a submodule
    x, w = torch.randn(5, 5, 3), sample_weights(5)
    g = one_at_a_time(copy.deepcopy(outer), (x,), w)
    varreg.observe(inner), varreg.observe(outer)
    losses(outer(x), w).mean().backward()
    assert_moments(outer, g)
    assert varreg.moments(inner.weight).count == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_general_rule_in_low_precision(dtype):
    model = Fn(lambda s, x: torch.einsum("btd,de->bte", x, s.w), w=weight(256, 256)).float()
    varreg.observe(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = model(torch.randn(2, 128, 256, dtype=torch.float32))
    out.float().square().mean().backward()
    assert varreg.moments(model.w).count == 2
    model.zero_grad()
    (
        model(torch.randn(2, 8, 256, dtype=torch.float32)).sum() * torch.inf
    ).backward()  # a loss scale that is too large


def test_a_registered_rule_for_a_module_with_submodules_is_refused(monkeypatch):
    monkeypatch.setattr("varreg.engine.mechanisms.by_module.MODULE_RULES", {})

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.w = linear(), weight(3)

        def forward(self, x):
            return self.inner(x) * self.w

    varreg.register_rule(Outer)(lambda module, dy, x: {"w": dy})
    model = Outer().double()
    varreg.observe(model)
    with pytest.raises(ValueError, match="it has submodules with parameters"):
        model(torch.randn(4, 3))


def test_a_module_that_calls_itself():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, x, depth=3):
            return x if depth == 0 else self(torch.tanh(self.layer(x)), depth - 1)

    model, x, w = Recursive().double(), torch.randn(5, 3), sample_weights(5)
    g = one_at_a_time(copy.deepcopy(model), (x,), w)
    varreg.observe(model)
    losses(model(x), w).mean().backward()
    assert_moments(model, g)


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


# ---- what changes between two trials


def doubled_where(choose):
    """Double all samples where a choice says so, which no batch makes before the sixth step."""
    return lambda s, x: s.l(x) * (2.0 if choose(x) else 1.0)


CHOICES = {
    "answer": doubled_where(lambda x: (x > 3).any()),
    "item": doubled_where(lambda x: x.max().item() > 3),
    "float": doubled_where(lambda x: float(x.max()) > 3),
    "count": doubled_where(lambda x: int((x > 3).sum()) > 0),
    "smallest": doubled_where(lambda x: (-x).min().item() < -3),
    "where": lambda s, x: torch.where((x > 3).any(), 2 * s.l(x), s.l(x)),
    "where-of-features": lambda s, x: torch.where((x > 3).any(0), 2 * s.l(x), s.l(x)),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_that_is_first_made_between_two_trials_is_refused(name):
    model = Fn(CHOICES[name], l=linear(4, 4))
    varreg.observe(model)
    for step in range(6):
        x = torch.randn(BATCH, 4).clamp(-2, 2)
        x[0, 0] += 8 if step == 5 else 0
        if step < 5:
            model(x).square().sum().backward()
    with pytest.raises(varreg.VarregError, match="takes values of the batch out of torch"):
        model(x)


def test_numbers_that_grow_all_the_time_are_tried_seldom(monkeypatch):
    from varreg.engine import escapes

    tried = []
    trial = escapes.try_forward
    monkeypatch.setattr(escapes, "try_forward", lambda *a: tried.append(1) or trial(*a))
    model = Fn(lambda s, x: s.l(x) + 0 * x.max().item(), l=linear(4, 4))
    varreg.observe(model)
    for step in range(70):
        model(torch.randn(3, 4) + 9 * step)
    # the first 16 records, the 32nd and 64th; the first four times, and the 8th, 16th, … one
    assert len(tried) <= 22


def test_a_mask_as_long_as_the_batch_may_change():
    def attend(s, x):
        return F.scaled_dot_product_attention(s.l(x)[None], x[None], x[None], attn_mask=s.mask)[0]

    model = Fn(attend, l=linear(4, 4))
    varreg.observe(model)
    model.mask = torch.eye(BATCH).bool()
    for _ in range(3):
        model(torch.randn(BATCH, 4)).sum().backward()
    model.mask = torch.ones(BATCH, BATCH).bool()
    with pytest.raises(varreg.VarregError, match="mixes samples"):
        model(torch.randn(BATCH, 4))


def test_a_trial_leaves_gradients_alone():
    """A backward of the user's that writes to `p.grad` runs in a trial, too: without a trace."""

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.w = w
            return x * 1.0

        @staticmethod
        def backward(ctx, grad):
            ctx.w.grad.add_(1.0)
            return grad, None

    model = Fn(lambda s, x: s.m(Writes.apply(s.l(x), s.w)), l=linear(4, 4), m=linear(4, 4))
    model.w = nn.Parameter(torch.zeros(2))
    varreg.observe(model)
    model.w.grad = kept = torch.zeros(2)
    with pytest.warns(UserWarning, match="'w': there is a gradient and there are no moments"):
        model(torch.randn(BATCH, 4)).sum().backward()
    assert model.w.grad is kept
    assert model.w.grad.tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_function_is_found_in_code_without_a_module(tmp_path, monkeypatch):
    (tmp_path / "scripted_for_test.py").write_text(
        "import torch\n\n@torch.jit.script\ndef mean_of(x: torch.Tensor) -> float:\n"
        "    return float(x.mean())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = {}
    exec(
        "from scripted_for_test import mean_of\n"
        "def helper(x): return mean_of(x)\n"
        "def forward(s, x): return s.l(x) * helper(x)",
        names,
    )
    model = Fn(names["forward"], l=linear(4, 4))
    varreg.observe(model)
    with pytest.raises(varreg.VarregError, match="a scripted function takes values"):
        model(torch.randn(BATCH, 4))


def test_rows_of_no_sample_are_tried_without_a_crash():
    """A trial may choose values for which an index picks nothing."""
    at = Ragged(2, 0, Owners(torch.tensor([])))
    for shape in ((0,), (0, 3)):
        assert samples_in(torch.ones(shape, dtype=torch.bool), at).tolist() == [False, False]


def test_samples_inside_of_a_dimension_beside_as_many_rows_are_refused():
    """With batch_dim=1, rows of dimension 0 are taken for samples where there are as many."""
    model = Fn(lambda s, x: s.l(x.T).T.contiguous().view(2, 4), l=linear(4, 4))
    varreg.observe(model, batch_dim=1)
    y = model(torch.randn(4, 2))
    with pytest.raises(varreg.VarregError, match="as many rows in dimension 0"):
        y.square().sum(1).mean().backward()


def test_time_first_with_as_many_steps_as_samples_is_exact():
    model = Fn(lambda s, x: s.l(x), l=linear(4, 4))
    varreg.observe(model, batch_dim=1)
    model(torch.randn(3, 3, 4)).square().mean().backward()
    assert varreg.moments(model.l.weight).count == 3


@pytest.mark.parametrize("norms", [False, True])
def test_an_empty_batch_is_no_sample(norms):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 2))
    observer = varreg.observe(model, norms=norms)
    for n in (0, 3):
        model(torch.randint(0, 5, (n, 3))).sum().backward()
    assert all(varreg.moments(p).count == 3 for p in model.parameters())
    if norms:
        assert len(observer.norms().values) == 3


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Conv1d(4, 3, 3, padding=1)])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_weight_that_a_hook_makes_is_no_output(norm, layer):
    """Hooks leave it in an attribute of the layer, and forward() uses it from there."""
    model = nn.Sequential(nn.Tanh(), norm(copy.deepcopy(layer).double())).eval()
    x = torch.randn(5, 4, 6) if isinstance(layer, nn.Conv1d) else torch.randn(5, 4)

    def gradients(samples):
        model.zero_grad()
        model(samples).square().flatten(1).mean(1).mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    alone = [gradients(x[i : i + 1]) for i in range(len(x))]
    with varreg.observe(model):
        gradients(x)
        for name, p in model.named_parameters():
            each = torch.stack([one[name] for one in alone])
            expected = each.square().mean(0)
            torch.testing.assert_close(varreg.moments(p).second_moment, expected)
        model.zero_grad()
        loss = model(x).square().mean()
        penalty = model[1].weight.square().sum()  # it is no sample's
        with pytest.raises(varreg.VarregError, match="from outside"):
            (loss + penalty).backward()


def test_nested_tensors_made_in_forward_are_refused():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            rows = torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)
            return self.layer(rows).to_padded_tensor(0.0)

    model = Nested()
    with varreg.observe(model), pytest.raises(varreg.VarregError, match="nested"):
        model(torch.randn(2, 3, 4))
