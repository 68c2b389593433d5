"""What cannot be observed, and the errors that say so: samples that meet, models, options."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import varreg
from tests.support.model_table import BATCH, Fn, weight
from tests.support.small_net import linear, net
from tests.support.truth import losses, sample_weights


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


def test_a_tensor_of_parameters_changed_in_place_is_refused():
    def forward(s, x):
        h = torch.zeros(len(x), 3) + s.p
        h.add_(s.l(x))
        return h * s.k(x)

    model = Fn(forward, p=weight(3), l=linear(), k=linear()).double()
    varreg.observe(model)
    with pytest.raises(ValueError, match="'p' but a tensor made of parameters is changed in place"):
        model(torch.randn(4, 3))


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
