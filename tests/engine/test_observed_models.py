"""What breaks other tools: each case has one right behaviour."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import varreg
from tests.support.measured import assert_moments
from tests.support.model_table import Fn, weight
from tests.support.truth import assert_close, losses, one_at_a_time, sample_weights, scale_of


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(n: int = 6):
    return torch.randn(n, 4), sample_weights(n)


def backward(model, x, w, scale=1.0):
    (losses(model(x), w).mean() * scale).backward()


def truth(model, x, w):
    return one_at_a_time(copy.deepcopy(model), (x,), w)


# ---- forwards and backwards that do not pair up
# ---------------------------------------------------------------------------


def test_forward_without_backward_retains_nothing_and_spoils_nothing():
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    abandoned = model(torch.randn(3, 4))
    with torch.no_grad():
        model(torch.randn(5, 4))
    node = weakref.ref(abandoned.grad_fn)
    del abandoned
    assert node() is None
    backward(model, x, w)
    assert_moments(model, g)


def test_an_abandoned_forward_that_is_still_alive():
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    kept = model(torch.randn(3, 4))
    backward(model, x, w)
    assert kept is not None
    assert_moments(model, g)


def test_backward_in_eval_mode():
    model = net().eval()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    backward(model, x, w)
    assert_moments(model, g)


def test_two_forwards_one_backward_are_two_uses_of_each_sample():
    model = net()
    (x, w), y = batch(), torch.randn(6, 4)
    pair = Fn(lambda s, x, y: torch.cat([s.model(x), s.model(y)], 1), model=model)
    g = one_at_a_time(copy.deepcopy(pair), (x, y), w)
    varreg.observe(model)
    losses(torch.cat([model(x), model(y)], 1), w).mean().backward()
    assert_moments(model, {n.removeprefix("model."): v for n, v in g.items()})


def test_one_backward_over_batches_of_different_size_is_refused():
    model = net()
    varreg.observe(model)
    with pytest.raises(
        RuntimeError,
        match=r"'2\.weight' was used for .* samples, and another .*Call backward\(\) once for each "
        r"batch",
    ):
        (model(torch.randn(6, 4)).sum() + model(torch.randn(4, 4)).sum()).backward()


def test_a_second_backward_through_the_same_forward_is_refused_unless_cleared():
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    loss = losses(model(x), w).mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Add the losses and call backward"):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert_moments(model, g)


def test_tied_weights_in_a_second_backward_after_clearing():
    model = Fn(lambda s, x: s.l(torch.tanh(s.l(x))), l=nn.Linear(4, 4)).double()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    loss = losses(model(x), w).mean()
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert_moments(model, g)


def test_a_failed_backward_does_not_spoil_the_next():
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    out = model(x)
    out.register_hook(lambda grad: None)
    with pytest.warns(
        UserWarning, match=r"'0' \(Linear\) was called outside of the model's forward"
    ):
        hidden = model[0](x)

    def fail(grad):
        raise KeyError("user error")

    hidden.register_hook(fail)
    with pytest.raises(KeyError):
        losses(model[2](torch.tanh(hidden)), w).mean().backward()
    model.zero_grad()
    backward(model, x, w)
    assert_moments(model, g)


def test_a_failed_forward_does_not_spoil_the_next():
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(6, 5))
    assert not torch.overrides._get_current_function_mode_stack()
    backward(model, x, w)
    assert_moments(model, g)


def test_autograd_grad_measures_nothing_and_is_right():
    model = net()
    x, w = batch()
    plain = copy.deepcopy(model)
    varreg.observe(model)
    x.requires_grad_()
    actual = torch.autograd.grad(losses(model(x), w).mean(), [x, *model.parameters()])
    expected = torch.autograd.grad(losses(plain(x), w).mean(), [x, *plain.parameters()])
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert all(varreg.moments(p) is None for p in model.parameters())


def test_an_attack_on_the_inputs_between_micro_batches_leaves_the_moments():
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    (losses(model(x[:3]), w[:3]).sum() / 6).backward()
    x2 = x[3:].clone().requires_grad_()
    torch.autograd.grad(model(x2).sum(), x2)
    losses(model(x2), w[3:]).sum().backward(inputs=[x2])
    (losses(model(x[3:]), w[3:]).sum() / 6).backward()
    assert_moments(model, g)


def test_second_derivatives_are_refused():
    model = net()
    varreg.observe(model)
    x = torch.randn(6, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_a_submodule_called_on_its_own():
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    with pytest.warns(
        UserWarning, match=r"'0' \(Linear\) was called outside .* first input, 6, for the number"
    ):
        losses(model[2](torch.tanh(model[0](x))), w).mean().backward()
    assert_moments(model, g)


def test_a_functional_call_with_other_parameters_is_not_observed():
    model = net()
    x, w = batch()
    varreg.observe(model)
    other = {n: torch.randn_like(p, requires_grad=True) for n, p in model.named_parameters()}
    out = torch.func.functional_call(model, other, x)
    losses(out, w).mean().backward()
    assert all(varreg.moments(p) is None for p in model.parameters())
    assert all(p.grad is not None for p in other.values())


# ---- gradients that come and go
# --------------------------------------------------------------------------------------------


def clear_optimizer(model):
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()


def clear_optimizer_zeros(model):
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=False)


def clear_model(model):
    model.zero_grad()


def clear_by_hand(model):
    for p in model.parameters():
        p.grad = None


def clear_in_place(model):
    for p in model.parameters():
        p.grad.zero_()


def clear_new_zeros(model):
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


@pytest.mark.parametrize(
    "clear",
    [
        clear_optimizer,
        clear_optimizer_zeros,
        clear_model,
        clear_by_hand,
        clear_in_place,
        clear_new_zeros,
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
def test_moments_restart_when_gradients_are_cleared(clear, read):
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    backward(model, torch.randn(9, 4), sample_weights(9))
    clear(model)
    if read:
        assert all(varreg.moments(p) is None for p in model.parameters())
    backward(model, x, w)
    assert_moments(model, g)


@pytest.mark.parametrize(
    "clip",
    [lambda p: clip_grad_norm_(p, 1e-3), lambda p: clip_grad_value_(p, 1e-3)],
    ids=["norm", "value"],
)
def test_clipping_leaves_the_moments(clip):
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    backward(model, x, w)
    clip(model.parameters())
    assert_moments(model, g)
    assert max(p.grad.abs().max() for p in model.parameters()) <= 1e-3


def test_gradients_that_are_zero_are_not_taken_for_cleared():
    model = nn.Linear(4, 1).double()
    varreg.observe(model)
    (model(torch.randn(3, 4)) * 0).sum().backward()
    (model(torch.randn(3, 4)) * 0).sum().backward()
    assert varreg.moments(model.weight).count == 6
    assert not varreg.moments(model.weight).variance.any()


def test_a_mean_gradient_of_zero():
    model = nn.Linear(1, 1, bias=False).double()
    varreg.observe(model)
    model(torch.tensor([[1.0], [-1.0]])).mean().backward()
    m = varreg.moments(model.weight)
    assert m.mean.item() == 0
    assert m.variance.item() == 1
    assert m.rho.item() == torch.inf


def test_variance_is_never_negative():
    model = nn.Linear(3, 2).float()
    varreg.observe(model)
    x = torch.full((50, 3), 1e4, dtype=torch.float32) + 1e-3 * torch.randn(
        50, 3, dtype=torch.float32
    )
    model(x).sum(1).mean().backward()
    assert (varreg.moments(model.weight).variance >= 0).all()


# ---- parameters
# --------------------------------------------------------------------------------------------------


def test_frozen_partly_frozen_and_unused_parameters():
    model = nn.ModuleDict(
        {"a": nn.Linear(4, 4), "b": nn.Linear(4, 3), "unused": nn.Linear(4, 2)}
    ).double()
    model["a"].requires_grad_(False)
    model["b"].bias.requires_grad_(False)
    whole = Fn(lambda s, x: s.m["b"](torch.tanh(s.m["a"](x))), m=model)
    x, w = batch()
    g = truth(whole, x, w)
    observer = varreg.observe(whole)
    backward(whole, x, w)
    assert varreg.moments(model["a"].weight) is None
    assert varreg.moments(model["b"].bias) is None
    assert varreg.moments(model["unused"].weight) is None
    assert model["unused"].weight.grad is None
    scale = scale_of(g)
    assert_close(
        varreg.moments(model["b"].weight).second_moment,
        g["m.b.weight"].square().mean(0),
        scale**2,
        "b.weight",
    )
    assert [row[3] for row in observer.coverage()] == [
        "frozen",
        "frozen",
        "exact",
        "frozen",
        "exact",
        "exact",
    ]


def test_unfreezing_later():
    model = net()
    model[0].requires_grad_(False)
    x, w = batch()
    varreg.observe(model)
    backward(model, x, w)
    model.zero_grad()
    model[0].requires_grad_(True)
    g = truth(model, x, w)
    backward(model, x, w)
    assert_moments(model, g)


def test_parameters_that_came_after_observe():
    model = net()
    x, w = batch()
    varreg.observe(model)
    model.load_state_dict(
        {k: torch.randn_like(v) for k, v in model.state_dict().items()}, assign=True
    )
    g = truth(model, x, w)
    backward(model, x, w)
    assert_moments(model, g)


def test_batch_of_one():
    model = net()
    x, w = batch(1)
    g = truth(model, x, w)
    varreg.observe(model)
    backward(model, x, w)
    assert_moments(model, g)
    assert not varreg.moments(model[0].weight).variance.any()


def test_empty_batch_updates_nothing():
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 4), nn.PReLU()
    ).double()
    varreg.observe(model)
    model(torch.randn(0, 2, 3, 3)).sum().backward()
    assert all(varreg.moments(p) is None for p in model.parameters())
    model(torch.randn(5, 2, 3, 3)).sum().backward()
    assert {varreg.moments(p).count for p in model.parameters()} == {5}


def test_zero_size_parameter():
    model = Fn(
        lambda s, x: torch.cat([s.l(x), x @ s.none], 1), l=nn.Linear(4, 3), none=weight(4, 0)
    ).double()
    varreg.observe(model)
    model(torch.randn(5, 4)).sum().backward()
    assert varreg.moments(model.none).variance.shape == (4, 0)
    assert varreg.moments(model.l.weight).count == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_squares_in_float32(dtype):
    model = nn.Linear(2, 1, bias=False, dtype=dtype)
    varreg.observe(model, reduction="sum")
    model(torch.tensor([[300.0, 1.0], [300.0, 3.0]], dtype=dtype)).sum().backward()
    m = varreg.moments(model.weight)
    assert m.second_moment.dtype == torch.float32
    assert m.second_moment.tolist() == [[90000.0, 5.0]]  # 300² is inf in float16
    assert model.weight.grad.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).float()
    x, w = torch.randn(6, 1, 5, 5, dtype=torch.float32), sample_weights(6).float()
    g = one_at_a_time(copy.deepcopy(model), (x,), w)
    varreg.observe(model)
    with torch.autocast("cpu", dtype):
        out = model(x)
    assert out.dtype == dtype
    losses(out.float(), w).mean().backward()
    for name, p in model.named_parameters():
        m = varreg.moments(p)
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(
            m.second_moment,
            g[name].square().mean(0),
            rtol=0.1,
            atol=0.02 * float(g[name].square().mean(0).max()),
        )


def test_a_loss_scale_leaves_rho():
    model = net()
    x, w = batch()
    varreg.observe(model)
    backward(model, x, w)
    before = [varreg.moments(p).rho for p in model.parameters()]
    model.zero_grad()
    backward(model, x, w, scale=65536.0)
    for a, p in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(varreg.moments(p).rho, a, rtol=1e-12, atol=0)


def test_nan_in_a_gradient_is_there_to_be_seen():
    model = net()
    varreg.observe(model)
    (model(torch.randn(3, 4)) * torch.nan).sum().backward()
    assert torch.isnan(varreg.moments(model[0].weight).variance).all()


# ---- BatchNorm
# --------------------------------------------------------------------------------------------------


def test_batch_norm_in_training_is_refused_with_both_remedies():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(
        ValueError, match=r"'1' \(BatchNorm1d\).*GroupNorm.*batch_norm='contribution'"
    ):
        varreg.observe(model)
    model.eval()
    varreg.observe(model)
    model.train()
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\)"):
        model(torch.randn(5, 4))


def test_batch_norm_without_parameters_mixes_samples_all_the_same():
    with pytest.raises(ValueError, match="BatchNorm in training"):
        varreg.observe(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False)))


def test_batch_norm_contributions_are_the_gradients_of_a_parameter_per_sample():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)).double()
    x, w = batch(8)
    # the truth: give every sample its own copy of every parameter, and differentiate
    copies = {
        n: p.detach().expand(8, *p.shape).clone().requires_grad_()
        for n, p in model.named_parameters()
    }
    h = torch.einsum("boi,bi->bo", copies["0.weight"], x) + copies["0.bias"]
    h = F.batch_norm(h, None, None, training=True) * copies["1.weight"] + copies["1.bias"]
    out = torch.einsum("boi,bi->bo", copies["3.weight"], torch.tanh(h)) + copies["3.bias"]
    losses(out, w).mean().backward()
    observer = varreg.observe(model, batch_norm="contribution")
    for _ in range(2):  # running statistics change between the forwards of two micro-batches
        model(x)
    backward(model, x, w)
    for name, p in model.named_parameters():
        c = copies[name].grad
        m = varreg.moments(p)
        torch.testing.assert_close(m.total, c.sum(0), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(m.square, c.square().sum(0), rtol=1e-9, atol=1e-14)
        torch.testing.assert_close(p.grad, c.sum(0), rtol=1e-9, atol=1e-12)
    assert "(contributions: samples may meet)" in repr(observer)


# ---- copies, removal, memory
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_independent_and_not_observed(how):
    model = net()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    backward(model, x, w)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert list(twin.state_dict()) == list(model.state_dict())
    twin.zero_grad()
    backward(twin, torch.randn(3, 4), sample_weights(3))
    assert all(varreg.moments(p) is None for p in twin.parameters())
    assert_moments(model, g)
    with varreg.observe(twin):
        twin.zero_grad()
        backward(twin, x, w)
        assert_moments(twin, g)


def test_outputs_can_be_saved_and_loaded_safely():
    model = net()
    varreg.observe(model)
    torch.save(model(torch.randn(3, 4)).detach(), file := io.BytesIO())
    file.seek(0)
    assert torch.load(file, weights_only=True).shape == (3, 3)


def test_remove_leaves_nothing():
    model = net()
    before = {id(m): set(vars(m)) for m in model.modules()}
    attributes = {n: set(vars(p)) for n, p in model.named_parameters()}
    observer = varreg.observe(model)
    x, w = batch()
    backward(model, x, w)
    observer.remove()
    observer.remove()
    for m in model.modules():
        assert set(vars(m)) == before[id(m)]
        assert not m._forward_hooks
        assert not m._forward_pre_hooks
        assert not m._forward_hooks_always_called
        assert not m._forward_hooks_with_kwargs
    for n, p in model.named_parameters():
        assert set(vars(p)) == attributes[n]
        assert not p._backward_hooks
        assert varreg.moments(p) is None
    assert "(removed)" in repr(observer)
    varreg.observe(model)


def test_the_with_block_removes():
    model = net()
    with varreg.observe(model):
        pass
    assert not model._forward_hooks


def test_memory_does_not_grow():
    model = Fn(
        gpt_like,
        e=nn.Embedding(9, 4),
        p=nn.Embedding(9, 4),
        l=nn.Linear(4, 4),
        c=nn.Conv1d(4, 4, 2),
    ).double()
    varreg.observe(model)

    def step():
        model.zero_grad()
        model(torch.randint(0, 9, (5, 6))).square().mean().backward()

    def tensors() -> int:
        return sum(1 for o in gc.get_objects() if issubclass(type(o), torch.Tensor))

    for _ in range(5):
        step()
    gc.collect()
    before = tensors()
    known = {id(o) for o in gc.get_objects()}
    gc.disable()  # reference counting alone must do
    try:
        for _ in range(50):
            step()
        # a ledger that is examined in this step keeps the size of what it added up
        assert tensors() <= before + len(list(model.parameters()))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [
            o
            for o in gc.garbage
            if (isinstance(o, torch.Tensor) or type(o).__module__.startswith("varreg"))
            # what a test before this one left (a compiled graph) may become garbage meanwhile
            and id(o) not in known
        ] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def gpt_like(s, x):
    h = torch.tanh(s.l(s.e(x) + s.p(torch.arange(x.shape[1]))))
    return F.linear(s.c(h.transpose(1, 2)).transpose(1, 2), s.e.weight)


def test_a_model_is_freed_with_its_observer():
    model = net()
    varreg.observe(model)
    backward(model, *batch())
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


def test_checkpointing_still_saves_memory():
    """A use keeps its tensors where autograd keeps them, so that a checkpoint can drop them."""
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    ).double()
    varreg.observe(model)
    x = torch.randn(6, 4, requires_grad=True)

    def kept() -> int:
        gc.collect()
        return sum(
            o.numel()
            for o in gc.get_objects()
            if issubclass(type(o), torch.Tensor) and not issubclass(type(o), nn.Parameter)
        )

    before = kept()
    out = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)
    assert kept() - before <= out.numel() + 6 * 4


def test_an_activation_that_is_told_to_require_a_gradient():
    """As transformers does for checkpoints of models whose first layers are frozen. It says
    nothing, and changes nothing.
    """
    model = Fn(
        lambda s, x: s.b(s.a(x).requires_grad_(True).tanh()), a=nn.Linear(4, 5), b=nn.Linear(5, 3)
    ).double()
    x, w = batch()
    g = truth(model, x, w)
    varreg.observe(model)
    backward(model, x, w)
    for name, p in model.named_parameters():
        assert_close(
            varreg.moments(p).second_moment, g[name].square().mean(0), scale_of(g) ** 2, name
        )


# ---- what cannot be attributed to samples is an error with a place
# --------------------------------------------------------------


def test_a_parameter_used_outside_of_forward_is_noticed():
    model = net()
    x, w = batch()
    varreg.observe(model)
    with pytest.raises(RuntimeError, match=r"'2\.bias' received a gradient from outside"):
        (losses(model(x), w).mean() + 10 * model[2].bias.square().sum()).backward()


def test_an_output_made_of_parameters_alone_is_refused_if_it_is_used():
    model = Fn(lambda s, x: (s.l(x), s.w.softmax(0)), l=nn.Linear(4, 2), w=weight(3)).double()
    varreg.observe(model)
    y, p = model(torch.randn(5, 4))
    y.sum().backward()
    y, p = model(torch.randn(5, 4))
    with pytest.raises(RuntimeError, match=r"of shape \(3,\), was made of parameters alone"):
        (y.sum() + p.log().sum()).backward()


def test_a_lost_batch_names_the_module_and_the_operation():
    model = Fn(
        lambda s, x: s.inner(x.flatten().unfold(0, 2, 1)),
        inner=Fn(lambda s, x: s.l(x), l=nn.Linear(2, 2)),
    ).double()
    varreg.observe(model)
    with pytest.raises(
        ValueError, match=r"in 'inner\.l' \(Linear\), linear uses 'inner\.l\.weight', .*unfold"
    ):
        model(torch.randn(6, 4))


def test_samples_that_are_mixed_are_refused():
    model = Fn(lambda s, x: s.w @ x, w=weight(6, 6)).double()
    varreg.observe(model)
    with pytest.raises(
        ValueError,
        match="cannot tell which part of its result belongs to which sample: matmul combines "
        "samples",
    ):
        model(torch.randn(6, 4))


def test_a_random_operation_without_a_rule_is_noticed():
    model = Fn(
        lambda s, x: F.scaled_dot_product_attention(x, x, s.w.view(4, 4), dropout_p=0.5),
        w=weight(4, 4),
    ).double()
    varreg.observe(model)
    out = model(torch.randn(6, 4, 4))
    with pytest.raises(RuntimeError, match="scaled_dot_product_attention in the model itself"):
        out.square().sum().backward()


def test_values_written_into_a_tensor_are_refused():
    def forward(s, x):
        y = x.clone()
        y[:, 0] = s.w
        return y

    model = Fn(forward, w=weight(3)).double()
    varreg.observe(model)
    with pytest.raises(
        ValueError,
        match=r"'w' but values made of parameters are written into a tensor; build it with "
        r"torch\.cat",
    ):
        model(torch.randn(5, 2, 3))


# ---- bad input
# --------------------------------------------------------------------------------------------------


def test_no_parameters():
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        varreg.observe(nn.ReLU())
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        varreg.observe(nn.Linear(2, 2).requires_grad_(False))


def test_not_a_module():
    with pytest.raises(ValueError, match=r"expects a torch\.nn\.Module, got list"):
        varreg.observe([nn.Linear(2, 2)])


def test_already_observed():
    model = net()
    observer = varreg.observe(model)
    with pytest.raises(ValueError, match=r"already observed, .* Call remove\(\)"):
        varreg.observe(model, groups=2)
    with pytest.raises(ValueError, match=r"already observed, .* Call remove\(\)"):
        varreg.observe(nn.Sequential(model))
    with pytest.raises(ValueError, match=r"already observed, .* Call remove\(\)"):
        varreg.observe(model[0])
    assert varreg.observe(model) is observer  # a cell of a notebook that is run again
    assert observer.is_on
    with pytest.raises(ValueError, match="already observed"):
        varreg.observe(nn.Sequential(model[0]))
    other = nn.Linear(4, 5)
    other.weight = model[0].weight
    with pytest.raises(ValueError, match="'weight' is already observed, through another model"):
        varreg.observe(other)
    observer.remove()
    with pytest.raises(ValueError, match="groups must be"):
        varreg.observe(model, groups=0)
    again = varreg.observe(model, groups=2)
    assert again is not observer
    assert varreg.observe(model, 2) is again


def test_a_copy_has_an_observer_of_its_own():
    """A copy is not observed."""
    model = net()
    observer = varreg.observe(model)
    twin = copy.deepcopy(model)
    assert varreg.observe(twin) is not observer
    assert varreg.observe(model) is observer


def test_is_observed():
    model = net()
    p = model[0].weight
    assert not varreg.is_observed(p)
    with varreg.observe(model):
        assert varreg.is_observed(p)
        assert varreg.moments(p) is None  # no backward yet
        assert not varreg.is_observed(torch.zeros(2))
    assert not varreg.is_observed(p)
    with pytest.raises(ValueError, match="is_observed expects a parameter"):
        varreg.is_observed(model)


def test_exceptions_of_ones_own_code_keep_their_traceback():
    class Broken(nn.Linear):
        def forward(self, x):
            return super().forward(x) + self.missing()

        def missing(self):
            raise KeyError("mine")

    model = Broken(2, 2)
    varreg.observe(model)
    with pytest.raises(KeyError, match="mine") as caught:
        model(torch.randn(3, 2))
    assert [entry.name for entry in caught.traceback][-2:] == ["forward", "missing"]
    assert caught.value.__cause__ is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled():
    with pytest.raises(ValueError, match=r"is compiled.*observe\(\) first, torch\.compile after"):
        varreg.observe(torch.compile(net()))
    model = net()
    model.compile()
    with pytest.raises(ValueError, match="is compiled"):
        varreg.observe(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripted():
    with pytest.raises(ValueError, match="TorchScript"):
        varreg.observe(torch.jit.script(net()))


def test_data_parallel():
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        varreg.observe(nn.DataParallel(net()))


@pytest.mark.parametrize("groups", [0, -1, 2.0, True, "8"])
def test_groups_that_are_no_positive_number(groups):
    with pytest.raises(
        ValueError, match="groups must be a positive whole number, or None for exact moments; got"
    ):
        varreg.observe(net(), groups=groups)


def test_more_groups_than_samples():
    model = net()
    varreg.observe(model, groups=8)
    with pytest.raises(
        ValueError, match=r"groups=8 needs at least 8 samples in a batch, got 5\. .*drop_last"
    ):
        model(torch.randn(5, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "average"}, "reduction must be 'mean' or 'sum'"),
        ({"batch_dim": -1}, "batch_dim must be a whole number from 0 up"),
        ({"batch_norm": "yes"}, "batch_norm must be 'refuse' or 'contribution'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        varreg.observe(net(), **options)


def test_complex_parameters():
    with pytest.raises(ValueError, match="'weight' is complex"):
        varreg.observe(nn.Linear(2, 2, dtype=torch.complex128))


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_embeddings_whose_gradients_are_not_sums_of_samples(option):
    with pytest.raises(ValueError, match=rf"'0' \(Embedding\) has {option}=True"):
        varreg.observe(nn.Sequential(nn.Embedding(5, 3, **{option: True})))
    model = Fn(lambda s, x: F.embedding(x, s.w, **{option: True}), w=weight(5, 3))
    varreg.observe(model)
    with pytest.raises(ValueError, match=rf"embedding with {option}=True is not supported"):
        model(torch.tensor([[1, 2], [3, 4]])).sum().backward()
