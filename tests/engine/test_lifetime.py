"""What an observer holds, and for how long: copies, removal, memory."""

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

import varreg
from tests.support.measured import assert_moments
from tests.support.model_table import Fn
from tests.support.small_net import backward, batch, net, truth
from tests.support.truth import sample_weights


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


def test_a_copy_has_an_observer_of_its_own():
    """A copy is not observed."""
    model = net()
    observer = varreg.observe(model)
    twin = copy.deepcopy(model)
    assert varreg.observe(twin) is not observer
    assert varreg.observe(model) is observer
