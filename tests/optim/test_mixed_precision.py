"""Autocast, loss scales that change, skipped steps, and parameters in half precision, against
float64 and against training without them.
"""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch
from torch import nn

import varreg
from tests.support import model_table as models
from tests.support.optimizer_table import RULES
from tests.support.truth import losses, one_at_a_time, sample_weights
from varreg.engine.parameters import LEDGERS
from varreg.optim.gradient import as_seen, products

CASES = {case.name: case for case in models.CASES}
NAMES = [
    *(
        "linear",
        "linear-inner",
        "conv2d",
        "conv_transpose2d",
        "embedding",
        "layer-norm",
        "rms-norm",
        "attention",
        "transformer",
        "gpt",
    ),
    *(
        "lstm",
        "lstm-layers",
        "gru-layers",
        "rnn-layers",
        "lstm-cell",
        "rnn-cell",
        "einsum",
        "weight-norm",
        "scale-and-shift",
    ),
]
BATCH = models.BATCH
BF16, FP16 = torch.bfloat16, torch.float16


def optimizers():
    """Every regularized optimizer, at its first settings and with momentum, and the wrapper."""
    for name, rule in RULES.items():
        yield pytest.param(lambda p, r=rule: r.regularized(p, **r.settings["plain"]), id=name)
    yield pytest.param(
        lambda p: varreg.VRSGD(p, lr=0.05, momentum=0.9, nesterov=True, per="tensor"),
        id="SGD-nesterov-tensor",
    )
    yield pytest.param(
        lambda p: varreg.VRAdamW(p, lr=0.01, per="model", history="mean"), id="AdamW-model"
    )
    yield pytest.param(
        lambda p: varreg.VarianceRegularized(torch.optim.RAdam(p, lr=0.05)), id="wrapped-RAdam"
    )


@pytest.fixture(autouse=True)
def _single():
    torch.set_default_dtype(torch.float32)  # the other fixture puts back what was


OPTIMIZERS = list(optimizers())


def cast(inputs, dtype):
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs)


def single(output):
    return (
        tuple(t.float() for t in output if t is not None)
        if isinstance(output, tuple)
        else output.float()
    )


def truth(model, inputs):
    """Per-sample gradients of the same model, with its rounded parameters and inputs, in
    float64.
    """
    torch.set_default_dtype(torch.float64)  # for what a model makes on its way
    found = one_at_a_time(
        copy.deepcopy(model).double(), cast(inputs, torch.float64), sample_weights(BATCH)
    )
    torch.set_default_dtype(torch.float32)
    return found


def check_moments(model, g, dtype):
    """An operation rounds what it takes and gives, by up to eps/2 each. A sample's gradient comes
    through about six of them in these models, forward and back: 3 eps of its size, unless
    operations amplify errors. Its square has twice the error, and the variance, a difference of the
    second moment and the squared mean, a bit more. All sums are in float32, and add nothing that
    could be seen. The largest errors that were found are 1.1 eps (mean), 3.7 eps (second moment)
    and 3.6 eps (variance).
    """
    eps = torch.finfo(dtype).eps
    for name, p in model.named_parameters():
        m = varreg.moments(p)
        assert m.total.dtype == m.square.dtype == m.variance.dtype == torch.float32
        assert p.grad.dtype == p.dtype
        assert m.count == BATCH
        second = g[name].square().mean(0)
        size = second.sum().sqrt()
        assert (m.mean - g[name].mean(0)).norm() <= 3 * eps * size, name
        assert (p.grad - g[name].mean(0)).norm() <= 3 * eps * size, name
        assert (m.second_moment - second).norm() <= 6 * eps * second.norm(), name
        assert (m.variance - g[name].var(0, correction=0)).norm() <= 8 * eps * second.norm(), name


@functools.cache
def has_lstm(dtype: torch.dtype) -> bool:
    """Return whether torch's own LSTM runs under autocast on this processor: oneDNN has none in
    float16, and one in bfloat16 only for AVX-512.
    """
    try:
        with torch.autocast("cpu", dtype):
            nn.LSTM(4, 3)(torch.randn(2, 1, 4, dtype=torch.float32))
    except RuntimeError:
        return False
    return True


def skip_without_lstm(name: str, dtype: torch.dtype) -> None:
    if name in ("lstm", "lstm-layers") and not has_lstm(dtype):
        pytest.skip(f"torch has no LSTM under autocast to {dtype} on this processor")


@pytest.mark.parametrize("inside", [False, True], ids=["", "backward-inside"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_moments_under_autocast(name, dtype, inside):
    skip_without_lstm(name, dtype)
    model, inputs = CASES[name].make(), CASES[name].inputs()
    g = truth(model, inputs)
    varreg.observe(model)
    with torch.autocast("cpu", dtype):
        output = model(*inputs)
        loss = losses(single(output), sample_weights(BATCH).float()).mean()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    check_moments(model, g, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_moments_of_parameters_in_half_precision(name, dtype):
    model, inputs = CASES[name].make().to(dtype), cast(CASES[name].inputs(), dtype)
    g = truth(model, inputs)
    varreg.observe(model)
    losses(single(model(*inputs)), sample_weights(BATCH).float()).mean().backward()
    check_moments(model, g, dtype)


def test_backward_under_autocast_of_a_shared_parameter():
    """Its contributions wait until the backward pass ends, and are summed up then: in float32,
    too.
    """
    model, inputs = CASES["called-twice"].make(), CASES["called-twice"].inputs()
    g = truth(model, inputs)
    varreg.observe(model)
    for _ in range(2):  # from the second time on, it is known to be shared
        model.zero_grad()
        with torch.autocast("cpu", BF16):
            losses(single(model(*inputs)), sample_weights(BATCH).float()).mean().backward()
        check_moments(model, g, BF16)


# ---- training with a loss scale
# --------------------------------------------------------------------------------------------


def net():
    """Convolution, attention, normalization, an LSTM and a dense layer. Attention has no bias: that
    of its keys has the gradient 0.
    """

    def run(s, x):
        h = s.conv(x).transpose(1, 2)
        h = s.norm(h + s.attention(h, h, h, need_weights=False)[0])
        return s.head(s.lstm(h)[0][:, -1])

    parts = {
        "conv": nn.Conv1d(3, 8, 2),
        "attention": nn.MultiheadAttention(8, 2, bias=False, batch_first=True),
        "norm": nn.LayerNorm(8),
    }
    return models.Fn(run, **parts, lstm=nn.LSTM(8, 4, batch_first=True), head=nn.Linear(4, 2))


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


def everything(model, optimizer):
    """Parameters, and all of the optimizer's state, torch's and ours."""
    state = [
        v.clone()
        for s in optimizer.state_dict()["state"].values()
        for v in s.values()
        if isinstance(v, torch.Tensor)
    ]
    return [p.detach().clone() for p in model.parameters()] + state


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def run(
    make,
    shape,
    optimizer_of,
    *,
    dtype=BF16,
    scaler=None,
    bad=(),
    steps=12,
    clip=None,
    split=(BATCH,),
    leave_out=(),
    zero_in_place=False,
):
    """Train, and return the model, the optimizer, and the numbers of the steps that the scaler
    skipped.

    Before each step in `bad` comes a batch whose gradients overflow; the steps in `leave_out` are
    not taken.
    """
    torch.manual_seed(0)
    model = make()
    varreg.observe(model)
    optimizer = optimizer_of(model.parameters())
    data = [torch.randn(BATCH, *shape) for _ in range(steps)]
    skipped = []
    for step in (i for i in range(steps) for _ in range(2 if i in bad and scaler else 1)):
        spoilt = step in bad and scaler and step not in skipped
        if step in leave_out:
            continue
        optimizer.zero_grad(set_to_none=not zero_in_place)
        for x in data[step].split(split):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = model(x)
            loss = loss.float().square().sum() / BATCH
            loss = loss * torch.inf if spoilt else loss
            (scaler.scale(loss) if scaler else loss).backward()
        if clip and scaler:
            scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler is None:
            optimizer.step()
            continue
        before, scale = everything(model, optimizer), scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:  # that is how it tells
            skipped.append(step)
            assert equal(before, everything(model, optimizer))
        else:
            assert not equal(before, everything(model, optimizer))
    return model, optimizer, skipped


def scaler_of(init_scale=2.0**10, **options):
    return torch.amp.GradScaler(
        "cpu", **{"init_scale": init_scale, "growth_interval": 2, **options}
    )


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("optimizer_of", OPTIMIZERS)
def test_a_scale_that_changes_changes_nothing(optimizer_of, dtype):
    """A power of two scales float32 and bfloat16 without rounding, so that everything is the same
    to the bit: λ and history, and what comes after a step that overflowed.
    """
    plain, ours, _ = run(mlp, (6,), optimizer_of, dtype=dtype)
    scaler = scaler_of()
    scaled, theirs, skipped = run(
        mlp, (6,), optimizer_of, dtype=dtype, scaler=scaler, bad=(0, 3, 8)
    )
    assert skipped == [0, 3, 8]
    assert scaler.get_scale() > 2.0**10  # it grew, too
    assert equal(everything(plain, ours), everything(scaled, theirs))
    for p, q in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.equal(ours.lambda_of(p), theirs.lambda_of(q))


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 0.05},
        {"split": (3, 3, 1)},
        {"split": (3, 3, 1), "clip": 0.05, "zero_in_place": True},
    ],
    ids=["clipped", "accumulated", "both"],
)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_a_scale_with_clipping_and_accumulation(name, options):
    rule = RULES[name]
    optimizer_of = lambda p: rule.regularized(p, **rule.settings["plain"])
    plain, ours, _ = run(mlp, (6,), optimizer_of, **options)
    scaled, theirs, skipped = run(mlp, (6,), optimizer_of, scaler=scaler_of(), bad=(4,), **options)
    assert skipped == [4]
    assert equal(everything(plain, ours), everything(scaled, theirs))
    other = run(mlp, (6,), optimizer_of)
    assert not equal(everything(plain, ours), everything(*other[:2]))  # the option did something


def test_it_would_be_seen_if_the_scale_were_not_taken_out(monkeypatch):
    optimizer_of = lambda p: varreg.VRSGD(p, lr=0.05, momentum=0.9)
    plain = run(mlp, (6,), optimizer_of)[:2]
    monkeypatch.setattr("varreg.optim.collect.as_seen", lambda m, grad, *_: (grad.clone(), 1.0))
    assert equal(everything(*plain), everything(*run(mlp, (6,), optimizer_of)[:2]))
    assert not equal(
        everything(*plain), everything(*run(mlp, (6,), optimizer_of, scaler=scaler_of())[:2])
    )


@pytest.mark.parametrize("optimizer_of", OPTIMIZERS)
def test_float16_overflows_by_itself(optimizer_of):
    """The scale grows until float16 overflows, again and again. What is left out is left out; the
    rest is as with a scale that stays.

    Scaled by a power of two, float16 rounds alike but for its smallest numbers (below 6e-5, 2**-10
    of them here), hence 1e-3.
    """
    scaler = scaler_of(2.0**15)
    model, ours, skipped = run(mlp, (6,), optimizer_of, dtype=FP16, scaler=scaler, steps=24)
    assert 2 <= len(skipped) <= 12
    twin, theirs, none = run(
        mlp,
        (6,),
        optimizer_of,
        dtype=FP16,
        scaler=scaler_of(2.0**10, growth_interval=1000),
        steps=24,
        leave_out=skipped,
    )
    assert none == []
    for a, b in zip(everything(model, ours), everything(twin, theirs), strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm()


@pytest.mark.parametrize(
    ("name", "per"), [("SGD", "element"), ("SGD", "tensor"), ("SGD", "model"), ("AdamW", "element")]
)
def test_training_in_bfloat16_is_near_to_training_in_float32(name, per):
    """All kinds of layer at once. Gradients with random errors of some 2**-8 leave the way of 20
    steps by about as much: torch's own SGD and AdamW by 0.2 % and 0.9 % of its length, ours by up
    to 1.2 % on a processor with AVX-512 and 3.9 % on one with AVX2, which rounds otherwise: λ is
    steep where gradients are near to 0.
    """
    optimizer_of = lambda p: RULES[name].regularized(
        p, lr={"SGD": 0.2, "AdamW": 0.005}[name], per=per, history="mean"
    )
    exact, _, _ = run(net, (3, 6), optimizer_of, dtype=torch.float32, steps=20)
    half, optimizer, skipped = run(
        net, (3, 6), optimizer_of, scaler=scaler_of(), bad=(5,), steps=20
    )
    torch.manual_seed(0)
    start, a, b = (
        torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (net(), exact, half)
    )
    assert skipped == [5]
    assert (a - start).norm() > 0.04 * start.norm()
    assert (a - b).norm() < 0.06 * (a - start).norm()
    assert all(
        v.dtype == torch.float32
        for s in optimizer.state_dict()["state"].values()
        for k, v in s.items()
        if k.startswith("vr_")
    )


def test_a_scale_whose_squares_overflow_leaves_lambda():
    """With bfloat16, nothing stops a scale from growing, until gradients reach 1e38; their squares
    do at 1e19.
    """
    found = {}
    for scale in (1.0, 2.0**80):
        torch.manual_seed(0)
        model = mlp()
        varreg.observe(model)
        optimizer = varreg.VRSGD(model.parameters(), lr=0.1)
        scaler = scaler_of(scale)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(BATCH, 6)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        found[scale] = [(optimizer.lambda_of(p).float(), p.detach()) for p in model.parameters()]
    torch.testing.assert_close(found[2.0**80], found[1.0], rtol=1e-3, atol=1e-4)


# ---- parameters in half precision
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_of", OPTIMIZERS)
def test_bfloat16_parameters_keep_float32_statistics(optimizer_of):
    """Also through a file; and training goes on from it to the bit."""

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(torch.randn(BATCH, 6, dtype=BF16)).float().square().mean().backward()
            optimizer.step()

    def statistics(optimizer):
        return {
            (i, k): v
            for i, s in enumerate(optimizer.state.values())
            for k, v in s.items()
            if k.startswith("vr_")
        }

    model = mlp().to(BF16)
    varreg.observe(model)
    optimizer = optimizer_of(model.parameters())
    train(model, optimizer, range(5))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = mlp().to(BF16)
    varreg.observe(again)
    again.load_state_dict(saved["model"])
    other = optimizer_of(again.parameters())
    other.load_state_dict(saved["optimizer"])
    for o in (optimizer, other):
        assert {v.dtype for v in statistics(o).values()} == {torch.float32}
        assert any(
            not torch.equal(v, v.to(BF16).float()) for v in statistics(o).values()
        )  # which bfloat16 would have lost
    assert equal(list(statistics(optimizer).values()), list(statistics(other).values()))
    if isinstance(optimizer, torch.optim.NAdam):
        # torch rounds a factor of its own on loading, mu_product, and does not go on to the bit
        return
    train(model, optimizer, range(5, 9))
    train(again, other, range(5, 9))
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True)
    )
    assert equal(list(statistics(optimizer).values()), list(statistics(other).values()))
    assert all(p.dtype == BF16 and p.isfinite().all() for p in model.parameters())


# ---- what rounding does to a gradient is not clipping
# -----------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True])
def test_accumulation_in_bfloat16_is_rounding_and_no_more(ties):
    """p.grad is rounded at each micro-batch, the sums are not. Two elements of the same size look
    like clipping by value.
    """
    parts = torch.randn(8, 500)
    parts[-1] -= 0.98 * parts.sum(
        0
    )  # they nearly cancel, so that rounding is large beside what is left
    if ties:
        parts[:, :2] = 1.0
    S, W, grad = parts.sum(0), parts.square().sum(0), torch.zeros(500, dtype=BF16)
    for part in parts:
        grad += part.to(BF16)
    assert not torch.allclose(grad.float(), S, rtol=0.1)
    m = varreg.Moments(8, 8, S, W)
    _, kappa2 = as_seen(m, grad, tuple(products(m, grad).tolist()), is_same_tensor=True)
    assert isinstance(kappa2, float)
    assert kappa2 == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("name", ["lstm", "gru-layers", "einsum"])
def test_autograds_own_gradients_under_autocast_are_rounded(name):
    """Measured beside it, the sum differs by rounding; that is no reason to think of single
    elements.
    """
    skip_without_lstm(name, BF16)
    model, inputs = CASES[name].make(), CASES[name].inputs()
    varreg.observe(model)
    for sign in (1.0, -0.97):  # two micro-batches that nearly cancel
        with torch.autocast("cpu", BF16):
            output = model(*inputs)
        (sign * losses(single(output), sample_weights(BATCH).float()).mean()).backward()
    for p in model.parameters():
        m = varreg.moments(p)
        assert not torch.equal(m.total, p.grad)
        assert isinstance(
            as_seen(m, p.grad, tuple(products(m, p.grad).tolist()), True, LEDGERS[p].precision)[1],
            float,
        )


def test_clipping_by_value_is_still_seen():
    model = mlp().to(BF16)
    varreg.observe(model)
    model(torch.randn(BATCH, 6, dtype=BF16)).float().square().sum().backward()
    p = model[0].weight
    m, before = varreg.moments(p), p.grad.clone()
    at = float(before.float().abs().median())
    nn.utils.clip_grad_value_([p], at)
    _, kappa2 = as_seen(m, p.grad, tuple(products(m, p.grad).tolist()), True, LEDGERS[p].precision)
    expected = (p.grad.float() / m.total).square()
    unclipped = before.abs() < p.grad.abs().max()
    torch.testing.assert_close(kappa2[~unclipped], expected[~unclipped], rtol=0.02, atol=0)
    torch.testing.assert_close(
        kappa2[unclipped], torch.ones_like(kappa2[unclipped]), rtol=0.02, atol=0
    )


@pytest.mark.parametrize("half", ["parameters", "autocast"])
def test_a_gradient_from_outside_is_still_seen(half):
    if half == "autocast":
        skip_without_lstm("lstm", BF16)
    model = CASES["lstm"].make()
    model = model.to(BF16) if half == "parameters" else model
    varreg.observe(model)
    (x,) = CASES["lstm"].inputs()
    with torch.autocast("cpu", BF16, enabled=half == "autocast"):
        out = single(model(x.to(BF16) if half == "parameters" else x))
    loss = losses(out, sample_weights(BATCH).float()).mean()
    with pytest.raises(RuntimeError, match="received a gradient from outside"):
        (loss + sum(p.float().square().sum() for p in model.parameters())).backward()
