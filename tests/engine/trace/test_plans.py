"""What is remembered of a call holds for calls of its form alone: whatever else comes is looked at,
and is exact or an error.
"""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import varreg
from tests.support.measured import assert_moments, prepared, run, truth_of
from tests.support.model_table import BATCH, CASES, Fn, weight
from tests.support.truth import losses, one_at_a_time, sample_weights
from varreg.engine.marks import DERIVED, begin_forward, mark
from varreg.engine.trace.layout import Layout
from varreg.engine.trace.plans import Plan, key_of


def step(model, *inputs):
    """A training step's moments against those of an unobserved copy, one sample at a time."""
    weights = sample_weights(len(inputs[0]))
    g = one_at_a_time(copy.deepcopy(model), inputs, weights)
    model.zero_grad()
    losses(model(*inputs), weights).mean().backward()
    assert_moments(model, g)


def just_step(model, *inputs):
    model.zero_grad()
    losses(model(*inputs), sample_weights(len(inputs[0]))).mean().backward()


def plans(observer):
    return observer.tracer.plans


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_later_step_is_measured_as_the_first(case):
    """Of every model: after a batch of another size, and one of the same."""
    model, inputs, weights = prepared(case)
    g = truth_of(case, model, inputs, weights)
    varreg.observe(model)
    for size in (BATCH - 3, BATCH):
        run(model, tree_map(lambda t, n=size: t[:n].clone(), inputs), weights[:size])
        model.zero_grad()
    run(model, inputs, weights)
    assert_moments(model, g)


def test_plans_are_made_and_kept():
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(9, 2))
    observer = varreg.observe(model)
    step(model, torch.randn(5, 2, 4))
    made = dict(plans(observer))
    assert len(made) == 4
    step(model, torch.randn(5, 2, 4))
    assert plans(observer) == made
    step(model, torch.randn(6, 2, 4))
    assert len(plans(observer)) == 8


def test_plans_are_not_kept_without_end(monkeypatch):
    monkeypatch.setattr("varreg.engine.trace.plans.MOST_PLANS", 5)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    observer = varreg.observe(model)
    for size in (2, 3, 4, 5):
        step(model, torch.randn(size, 3))
        assert len(plans(observer)) <= 5


def test_as_many_positions_as_samples_and_another_number():
    model = Fn(
        lambda s, x: s.b(s.a(x).transpose(1, 2).reshape(len(x), -1)[:, :6]),
        a=nn.Linear(3, 2),
        b=nn.Linear(6, 2),
    )
    varreg.observe(model)
    for batch, time in ((4, 5), (5, 5), (5, 4), (5, 5), (3, 3), (4, 5)):
        step(model, torch.randn(batch, time, 3))


def test_the_same_shape_with_the_batch_elsewhere():
    model = Fn(
        lambda s, x: s.l(x) if s.first else s.l(x.transpose(0, 1)).transpose(0, 1),
        l=nn.Linear(3, 3),
    )
    varreg.observe(model)
    for model.first in (True, False, True, False):
        step(model, torch.randn(5, 5, 3) * torch.arange(1.0, 6)[:, None])


def test_an_index_with_other_values():
    model = Fn(lambda s, x: s.l(x[s.order[: len(x)]]) * s.w, l=nn.Linear(3, 3), w=weight(3))
    varreg.observe(model)
    model.order = torch.arange(5)
    step(model, torch.randn(5, 3))
    model.order = torch.arange(5).flip(0)
    with pytest.raises(RuntimeError, match="not the samples in their order"):
        just_step(model, torch.randn(5, 3))
    model.order = torch.arange(5)
    step(model, torch.randn(5, 3))


def test_an_index_with_other_values_in_a_call_that_was_tried():
    """In the first call it changes nothing; in the second one it shuffles."""
    model = Fn(lambda s, x: s.l(torch.tanh(s.l(x)).index_select(0, s.order)), l=nn.Linear(3, 3))
    varreg.observe(model)
    model.order = torch.arange(5)
    just_step(model, torch.randn(5, 3))
    model.order = torch.arange(5).flip(0)
    with pytest.raises(RuntimeError, match="not the samples in their order"):
        just_step(model, torch.randn(5, 3))


def test_a_tensor_that_lost_the_batch_where_one_that_carries_it_was():
    model = Fn(lambda s, x: s.l(x[torch.randperm(len(x))] if s.shuffles else x), l=nn.Linear(3, 2))
    varreg.observe(model)
    model.shuffles = False
    step(model, torch.randn(6, 3))
    model.shuffles = True
    with pytest.raises(RuntimeError, match="not the samples in their order"):
        just_step(model, torch.randn(6, 3))


def test_a_constant_where_one_that_carries_the_batch_was():
    """Both times `[5, 5] @ [5, 5]`; the second mixes samples."""
    model = Fn(
        lambda s, x: torch.tanh(s.l(x) @ s.c if s.right else s.c @ s.l(x)), l=nn.Linear(5, 5)
    )
    model.c = torch.randn(5, 5)
    varreg.observe(model)
    model.right = True
    step(model, torch.randn(5, 5))
    model.right = False
    with pytest.raises(ValueError, match="combines samples"):
        just_step(model, torch.randn(5, 5))


def test_the_same_tensor_twice():
    """A product of each sample with itself keeps samples apart; one of the whole batch does not."""
    model = Fn(lambda s, x, y: s.l(torch.bmm(x, x if s.same else y)), l=nn.Linear(3, 2))
    varreg.observe(model)
    for model.same in (False, True):
        step(model, torch.randn(3, 3, 3), torch.randn(3, 3, 3))
    model = Fn(lambda s, x: s.l(x @ x), l=nn.Linear(3, 2))
    varreg.observe(model)
    with pytest.raises(ValueError, match="combines samples"):
        just_step(model, torch.randn(3, 3))


def test_batch_norm_from_evaluation_to_training():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    varreg.observe(model)
    step(model, torch.randn(5, 3))
    model.train()
    with pytest.raises(ValueError, match="is BatchNorm in training"):
        just_step(model, torch.randn(5, 3))
    model.eval()
    step(model, torch.randn(5, 3))


def test_dropout_in_training_and_evaluation():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    varreg.observe(model)
    just_step(model, torch.randn(5, 3))
    model.eval()
    step(model, torch.randn(5, 3))
    model.train()
    just_step(model, torch.randn(5, 3))
    for p in model.parameters():
        torch.testing.assert_close(varreg.moments(p).total, p.grad)


def test_freezing_and_unfreezing():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    varreg.observe(model)
    for frozen in ((), (0,), (1,), (0, 1, 2), (2,), (), (3, 0)):
        for i, p in enumerate(model.parameters()):
            p.requires_grad_(i not in frozen)
            p.grad = None
        x = torch.randn(5, 3, requires_grad=True)
        step(model, x)
        assert all(
            (varreg.moments(p) is None) == (i in frozen) for i, p in enumerate(model.parameters())
        )


def test_a_parameter_that_is_replaced():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    varreg.observe(model)
    step(model, torch.randn(5, 3))
    model[0].weight = nn.Parameter(torch.randn(4, 3))
    step(model, torch.randn(5, 3))
    model[2] = nn.Linear(4, 2)
    step(model, torch.randn(5, 3))


def test_another_precision():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    varreg.observe(model)
    step(model, torch.randn(5, 3))
    model.float()
    just_step(model, torch.randn(5, 3).float())
    assert all(varreg.moments(p).square.dtype == torch.float32 for p in model.parameters())
    model.double()
    step(model, torch.randn(5, 3))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_after_steps_without(reentrant):
    """A re-entrant checkpoint runs forward without gradients: what was planned with them does not
    hold there.
    """

    def forward(s, x):
        y = torch.tanh(s.l(x))
        for _ in range(s.times):
            y = torch.tanh(checkpoint(s.k, y, use_reentrant=reentrant) if s.saves else s.k(y))
        return y

    model = Fn(
        forward, l=nn.Linear(3, 3), k=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    )
    varreg.observe(model)
    for model.saves, model.times in ((False, 1), (True, 2), (False, 2), (True, 1), (True, 3)):
        step(model, torch.randn(5, 3))


def test_without_gradients_in_between():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    varreg.observe(model)
    x = torch.randn(5, 3)
    step(model, x)
    with torch.no_grad():
        assert not model(x).requires_grad
    with torch.inference_mode():
        model(x)
    step(model, x)


def test_in_another_thread():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    varreg.observe(model)
    step(model, torch.randn(5, 3))
    caught: list[BaseException] = []

    def work():
        try:
            step(model, torch.randn(5, 3))
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not caught
    step(model, torch.randn(5, 3))


def test_one_observed_model_in_another():
    inner = nn.Linear(3, 3)
    outer = Fn(
        lambda s, x: s.b(torch.tanh(s.held[0](s.a(x)))), a=nn.Linear(3, 3), b=nn.Linear(3, 2)
    )
    outer.held = (inner,)
    both = nn.ModuleList([outer, inner])
    weights = sample_weights(5)
    varreg.observe(outer), varreg.observe(inner)
    for _ in range(3):
        x = torch.randn(5, 3)
        twin = copy.deepcopy(outer)
        twin.inner = twin.held[0]
        g = one_at_a_time(twin, (x,), weights)
        both.zero_grad()
        losses(outer(x), weights).mean().backward()
        for name, p in (
            *outer.named_parameters(),
            *((f"inner.{n}", p) for n, p in inner.named_parameters()),
        ):
            torch.testing.assert_close(
                varreg.moments(p).second_moment, g[name].square().mean(0), rtol=1e-9, atol=1e-12
            )


def test_a_way_of_splitting_batches_that_changes():
    """As when a model comes into DistributedDataParallel after its first step."""
    model = nn.Linear(3, 2)
    observer = varreg.observe(model, groups=4)
    for world, groups in ((1, 4), (2, 2), (1, 4)):
        observer.grouping.world = world
        just_step(model, torch.randn(8, 3))
        assert varreg.moments(model.weight).groups == groups


# ---- forms
# --------------------------------------------------------------------------------------------------


def form(func, *args, **kwargs):
    return key_of(func, args, kwargs, lambda t: isinstance(t, nn.Parameter))[0]


def carrying(*shape, dim=0) -> Tensor:
    t = torch.randn(shape)
    mark(t, Layout(shape[dim], dim))
    return t


def test_what_tells_forms_apart():
    begin_forward()
    x, y = carrying(4, 4), carrying(4, 4)
    get = Tensor.__getitem__
    forms = [
        *(
            form(get, x, 1),
            form(get, x, True),
            form(get, x, 1.0),
            form(get, x, None),
            form(get, x, ...),
            form(get, x, slice(1)),
        ),
        *(
            form(get, x, slice(1, None)),
            form(get, x, (1,)),
            form(get, x, [1]),
            form(get, x, (1, (1,))),
            form(get, x, ((1, 1),)),
        ),
        *(
            form(get, x, torch.tensor(1)),
            form(get, carrying(4, 4, dim=1), 1),
            form(get, carrying(4, 5), 1),
        ),
        *(
            form(F.linear, x, y),
            form(F.linear, x, torch.randn(4, 4)),
            form(F.linear, x, weight(4, 4)),
        ),
        *(
            form(F.linear, x.float(), weight(4, 4)),
            form(F.linear, torch.randn(4, 4), x),
            form(F.linear, x, weight=weight(4, 4)),
        ),
        *(
            form(torch.sum, x, dim=1),
            form(torch.sum, x, axis=1),
            form(torch.sum, x, 1),
            form(torch.sum, x, 1, True),
        ),
    ]
    assert None not in forms
    assert len(set(forms)) == len(forms)
    assert form(F.linear, x, y) == form(F.linear, carrying(4, 4), carrying(4, 4))


def test_what_has_no_form():
    begin_forward()
    x, lost, derived = carrying(4, 4), torch.randn(4, 4), torch.randn(4, 4)
    mark(lost, varreg.engine.trace.layout.Lost("it was shuffled"))
    mark(derived, DERIVED)
    made = torch.randn(4, 4, requires_grad=True) * 2
    part = nn.utils.rnn.pack_sequence([torch.ones(2)])

    class Own(Tensor):
        pass

    for other in (
        x,
        lost,
        derived,
        made,
        part,
        object(),
        torch.randn(4, 4).as_subclass(Own),
        {"dim": 1},
    ):
        assert form(torch.add, x, other) is None


def test_results_of_other_shapes_do_not_fit():
    place = torch.Size((4, 2)), (4, 0, 1, 1)
    assert Plan((place,)).fits(torch.zeros(4, 2))
    assert not any(
        Plan((place,)).fits(o) for o in [torch.zeros(2, 4), 3, None, [torch.zeros(4, 2)] * 2]
    )
    assert not Plan((place, place)).fits(torch.zeros(4, 2))
    assert not Plan((None,)).fits(torch.zeros(4, 2))
    plan = Plan((place, None))
    assert plan.fits((torch.zeros(4, 2), 3))
    assert not any(
        plan.fits(o)
        for o in [
            (torch.zeros(2, 4), 3),
            (torch.zeros(4, 2),),
            (3, 3),
            (torch.zeros(4, 2), torch.zeros(1)),
        ]
    )


# ---- values of constants that decide, and change
# -----------------------------------------------------------------------------------


class Changing(nn.Module):
    """A layer, and a buffer whose values say what becomes of samples."""

    def __init__(self, run, values):
        super().__init__()
        self.fc, self.run = nn.Linear(4, 4, dtype=torch.float64), run
        self.register_buffer("c", values)

    def forward(self, x):
        return self.run(self, x)


def smoothed(s, x):
    """Convolve over samples."""
    return F.conv1d(s.fc(x).T.unsqueeze(1), s.c, padding=1).squeeze(1).T


def bags(s, x):
    return s.fc(F.embedding_bag((x > 0).long().flatten(), x.new_ones(2, 4).cumsum(0), s.c))


def table_bags(s, x):
    return F.embedding_bag((x > 0).long().flatten(), s.fc.weight, s.c)


CHANGING = {
    "a convolution over samples": (
        smoothed,
        torch.tensor([[[0.0, 1.0, 0.0]]]),
        torch.ones(1, 1, 3),
    ),
    "a mixture by an operator": (
        lambda s, x: torch.ops.aten.lerp(s.fc(x), s.fc(x).flip(0), s.c),
        torch.tensor(0.0),
        torch.tensor(0.5),
    ),
    "offsets of bags": (bags, torch.tensor([0, 4, 8, 12]), torch.tensor([0, 3, 8, 12])),
    "offsets of a table's bags": (
        table_bags,
        torch.tensor([0, 4, 8, 12]),
        torch.tensor([0, 3, 8, 12]),
    ),
    "ends of a slice": (
        lambda s, x: torch.cat([s.fc(x), s.fc(x)])[s.c : s.c + 4],
        torch.tensor(0),
        torch.tensor(1),
    ),
    "a shift by padding": (
        lambda s, x: F.pad(s.fc(x), (0, 0, s.c, -s.c)),
        torch.tensor(0),
        torch.tensor(1),
    ),
}


@pytest.mark.parametrize("name", CHANGING)
def test_no_plan_is_kept_where_values_of_a_constant_decide(name):
    run, before, after = CHANGING[name]
    to = lambda t: t.double() if t.is_floating_point() else t.clone()
    model = Changing(run, to(before))
    varreg.observe(model)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(4, 4, dtype=torch.float64)).square().sum(1).mean().backward()
    model.c.copy_(after)
    with pytest.raises(varreg.VarregError):
        model(torch.randn(4, 4, dtype=torch.float64)).square().sum(1).mean().backward()
