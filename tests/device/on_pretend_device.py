"""What holds on a device that is not the CPU. Run by test_devices.py, in a process of its own."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks import launches
from benchmarks.launches import OPTIMIZERS, counted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map
from typer.testing import CliRunner

import varreg
from tests.support import pretend_device
from tests.support.measured import prepared, run, truth_of
from tests.support.model_table import CASES
from tests.support.ranks import NEEDS_FSDP
from varreg import devices
from varreg.cli import app
from varreg.engine.parameters import LEDGERS
from varreg.errors import MeasurementError
from varreg.lab.bench.workloads import WORKLOADS, Workload, images, text
from varreg.lab.models import GPT, paper_cnn
from varreg.lab.tasks.catalog import per_token
from varreg.native import library
from varreg.options import HISTORIES

DEVICE = "pretend"  # it is registered only where these tests run
KNOWN = {c.name: c for c in CASES if not c.random}


@pytest.fixture
def _no_float64():
    devices.has_float64.cache_clear()
    with pretend_device.without_float64():
        yield
    devices.has_float64.cache_clear()


def to_device(tree):
    def move(t):
        t = t.float() if t.is_floating_point() else t
        return t.to(DEVICE)

    return tree_map(lambda t: move(t) if isinstance(t, torch.Tensor) else t, tree)


# ---- without float64 -----------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", KNOWN.values(), ids=KNOWN)
@pytest.mark.usefixtures("_no_float64")
def test_moments_without_float64(case):
    model, inputs, weights = prepared(case)
    truth = truth_of(case, model, inputs, weights)
    model = copy.deepcopy(model).float().to(DEVICE)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(DEVICE)  # some make tensors in their forward
    varreg.observe(model)
    run(model, to_device(inputs), to_device(weights))
    scale = max(float(g.abs().max()) for g in truth.values())
    for name, p in model.named_parameters():
        m, g = varreg.moments(p), truth.get(name, torch.zeros(()))
        if m is None:
            assert not g.any(), name
            continue
        for actual, expected, size in (
            (m.mean, g.mean(0), scale),
            (m.variance, g.var(0, correction=0), scale**2),
        ):
            gap = (actual.cpu().double() - expected).abs().max()
            assert gap <= 1e-4 * size, f"{name}: {gap} at {size}"


@pytest.mark.usefixtures("_no_float64")
@pytest.mark.parametrize("name", ["VRSGD", "VRAdam", "VRAdamW", "VRNAdam", "VRRMSprop"])
@pytest.mark.parametrize("per", ["element", "tensor", "model"])
def test_optimizers_without_float64(name, per):
    options = {"lr": 0.01, "per": per, "calibrate": per == "element"}
    as_on_the_cpu(lambda parameters: getattr(varreg, name)(parameters, **options))


def as_on_the_cpu(make, steps=5, **observed):
    """Compare parameters after some steps with those of the same training on the CPU."""
    torch.set_default_dtype(torch.float32)
    here = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    there = copy.deepcopy(here).to(DEVICE)
    observers = [varreg.observe(model, **observed) for model in (here, there)]
    optimizers = [make(model.parameters()) for model in (here, there)]
    for _ in range(steps):
        x = torch.randn(8, 4)
        for model, optimizer in zip((here, there), optimizers, strict=True):
            optimizer.zero_grad()
            model(x.to(next(model.parameters()).device)).square().mean().backward()
            optimizer.step()
    for p, q in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=2e-3, atol=2e-4)
        lam = optimizers[0].lambda_of(p)
        torch.testing.assert_close(optimizers[1].lambda_of(q).cpu(), lam, rtol=0.01, atol=0.01)
        assert not torch.equal(lam, torch.ones_like(lam))
    return observers


UPDATE_RULES = {
    "SGD, Nesterov": (varreg.VRSGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD, dampening": (varreg.VRSGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "Adam, amsgrad": (varreg.VRAdam, {"amsgrad": True}),
    "Adam, direct": (varreg.VRAdam, {"variance": "direct"}),
    "NAdam": (varreg.VRNAdam, {}),
    "NAdam, direct": (varreg.VRNAdam, {"variance": "direct"}),
    "Adagrad": (varreg.VRAdagrad, {}),
    "Adagrad, simplified": (varreg.VRAdagrad, {"variance": "simplified"}),
    "Adadelta": (varreg.VRAdadelta, {}),
    "Adadelta, direct": (varreg.VRAdadelta, {"variance": "direct"}),
    "RMSprop": (varreg.VRRMSprop, {}),
    "RMSprop, centered, momentum": (varreg.VRRMSprop, {"centered": True, "momentum": 0.9}),
    "raw variance": (varreg.VRSGD, {"scale_free": False}),
    "cap": (varreg.VRSGD, {"cap": 0.5}),
    "sigmoid": (varreg.VRSGD, {"form": "sigmoid", "s": 1.0}),
    "affine": (varreg.VRSGD, {"form": "affine", "history": "harmonic"}),
    "bounds": (varreg.VRSGD, {"lambda_min": 0.5, "lambda_max": 1.5}),
}
UPDATE_RULES |= {f"history {name}": (varreg.VRSGD, {"history": name}) for name in HISTORIES}


@pytest.mark.usefixtures("_no_float64")
@pytest.mark.parametrize(("make", "options"), UPDATE_RULES.values(), ids=UPDATE_RULES)
def test_update_rules_without_float64(make, options):
    as_on_the_cpu(lambda parameters: make(parameters, lr=0.01, **options))


@pytest.mark.usefixtures("_no_float64")
@pytest.mark.parametrize("base", [torch.optim.RAdam, torch.optim.Adamax, torch.optim.Rprop])
def test_a_wrapped_optimizer_without_float64(base):
    as_on_the_cpu(lambda parameters: varreg.VarianceRegularized(base(parameters, lr=0.01)))


@pytest.mark.usefixtures("_no_float64")
@pytest.mark.parametrize("per", ["tensor", "model"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_totals_without_float64(per, wrapped):
    def make(parameters):
        if wrapped:
            return varreg.VarianceRegularized(torch.optim.Adamax(parameters, lr=0.01), per=per)
        return varreg.VRSGD(parameters, lr=0.01, momentum=0.9, per=per)

    as_on_the_cpu(make, per=per)


@pytest.mark.usefixtures("_no_float64")
def test_groups_without_float64():
    as_on_the_cpu(lambda parameters: varreg.VRAdam(parameters, lr=0.01), groups=4)


@pytest.mark.usefixtures("_no_float64")
@pytest.mark.parametrize("per", ["element", "model"])
def test_norms_without_float64(per):
    def make(parameters):
        return varreg.VRSGD(parameters, lr=0.01, per=per)

    here, there = (observer.norms().values for observer in as_on_the_cpu(make, per=per, norms=True))
    torch.testing.assert_close(there.cpu().to(here), here, rtol=1e-2, atol=1e-4)


@pytest.mark.usefixtures("_no_float64")
def test_squares_beyond_float32_are_not_known_without_float64():
    torch.set_default_dtype(torch.float32)
    layer = nn.Linear(3, 2).to(DEVICE)
    varreg.observe(layer)
    (layer(torch.randn(4, 3, device=DEVICE)).sum(1) * 1e25).mean().backward()
    with pytest.warns(UserWarning, match="no float64"):
        m = varreg.moments(layer.weight)
    assert m.square.isnan().any()


def test_squares_beyond_float32_are_known_from_the_second_step():
    torch.set_default_dtype(torch.float32)
    layer = nn.Linear(3, 2).to(DEVICE)
    varreg.observe(layer)
    optimizer = varreg.VRSGD(layer.parameters(), lr=1e-30)
    x = torch.randn(4, 3, device=DEVICE)
    for step in range(3):
        optimizer.zero_grad()
        (layer(x).sum(1) * 1e25).mean().backward()
        if step:
            m = varreg.moments(layer.weight)
            assert m.square.dtype == torch.float64
            assert bool(m.rho.isfinite().all())
            optimizer.step()
        else:
            with pytest.warns(UserWarning, match="too large"):
                optimizer.step()
    for _ in range(3):  # and back
        optimizer.zero_grad()
        layer(x).sum(1).mean().backward()
        optimizer.step()
    assert varreg.moments(layer.weight).square.dtype == torch.float32


# ---- another default device ----------------------------------------------------------------------


def test_a_model_on_the_cpu_while_another_device_is_the_default():
    torch.set_default_device(DEVICE)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3)).to("cpu")
    conv = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(3, 3), nn.Flatten()).to("cpu")
    for net, x in (
        (model, torch.randint(0, 9, (5, 2), device="cpu")),
        (conv, torch.randn(4, 2, 6, 6, device="cpu")),
    ):
        varreg.observe(net)
        optimizer = varreg.VRAdam(net.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        for p in net.parameters():
            assert p.is_cpu
            assert varreg.moments(p).square.is_cpu
            assert optimizer.lambda_of(p).is_cpu


@pytest.mark.filterwarnings("ignore:.*torch.compile")
def test_a_compiled_model_does_not_wait():
    """The marker of a compiled forward is a number on the CPU, whatever device is the default."""
    torch.set_default_device(DEVICE)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    varreg.observe(model)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(8, 4)
    for _ in range(3):
        model.zero_grad()
        with pretend_device.count() as count:
            compiled(x).square().mean().backward()
    assert varreg.moments(model[0].weight).count == 8
    assert not count.waits


# ---- a model on two devices ----------------------------------------------------------------------


class Halves(nn.Module):
    """A model of which one half is on the CPU, and the other may be elsewhere."""

    def __init__(self, where):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.second.to(where)

    def forward(self, x):
        return self.second(self.first(x).tanh().to(self.second.weight.device)).cpu()


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("per", ["element", "tensor", "model"])
@pytest.mark.parametrize("name", ["VRSGD", "VRAdamW"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_model_on_two_devices_steps_as_on_one(name, per, native, set_to_none, monkeypatch):
    if native == "0":
        monkeypatch.setattr(library, "load", lambda: (None, "off"))
    here, there = Halves("cpu"), Halves(DEVICE)
    there.load_state_dict(here.state_dict())
    optimizers = []
    for model in (here, there):
        varreg.observe(model)
        options = {"lr": 0.01, "per": per, "calibrate": per != "model", "weight_decay": 0.1}
        optimizers.append(getattr(varreg, name)(model.parameters(), **options))
    for _ in range(4):
        x = torch.randn(8, 4)
        for model, optimizer in zip((here, there), optimizers, strict=True):
            optimizer.zero_grad(set_to_none)
            model(x).square().mean().backward()
            optimizer.step()
    for p, q in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(q.cpu(), p)


# ---- random numbers ------------------------------------------------------------------------------


def test_dropout_is_no_mixing_and_leaves_the_generator():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)).to(DEVICE)
    x = torch.randn(6, 4, device=DEVICE)
    torch.manual_seed(3)
    plain = copy.deepcopy(model)(x)
    after = torch.rand(3, device=DEVICE)
    varreg.observe(model)
    torch.manual_seed(3)
    out = model(x)
    assert torch.equal(out, plain)
    assert torch.equal(torch.rand(3, device=DEVICE), after)
    out.square().mean().backward()
    assert varreg.moments(model[0].weight).count == 6


# ---- synchronisations and launches ---------------------------------------------------------------


class Tokens(nn.Module):
    """Embeddings, positions that are looked up once for the batch, attention, and a norm."""

    def __init__(self):
        super().__init__()
        self.gpt = GPT(layers=2, width=32, heads=2, vocabulary=256, context=64)

    def forward(self, ids):
        return self.gpt(ids)


MODELS = {
    "tokens": Workload("tokens", Tokens, text(8, 16), per_token),
    "cnn": Workload("cnn", paper_cnn, images(8, 1, 28, 28), F.cross_entropy),
}
LOOPS = {
    "plain": {},
    "accumulation": {"micro_batches": 4},
    "clipped": {"clip": True},
    "both": {"micro_batches": 2, "clip": True},
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("w", MODELS.values(), ids=MODELS)
def test_nothing_waits_but_the_step_once(w, optimizer, loop):
    torch.set_default_dtype(torch.float32)
    _, make, options = OPTIMIZERS[optimizer]
    phases = counted(w, make, options, observe=True, **loop)
    assert not phases["forward"].waits
    assert not phases["backward"].waits
    assert sum(phases["step"].waits.values()) <= 1, phases["step"].waits


SUMS = {"totals": {"per": "model"}, "norms": {"norms": True}}
SUMS["totals and norms"] = {"per": "tensor", "norms": True}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("sums", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("w", MODELS.values(), ids=MODELS)
def test_other_sums_wait_once(w, sums, loop):
    torch.set_default_dtype(torch.float32)
    options = {"lr": 0.01, "momentum": 0.9, "per": sums.get("per", "element")}
    phases = counted(w, varreg.VRSGD, options, observe=True, observed=sums, **loop)
    assert not phases["forward"].waits
    assert not phases["backward"].waits, phases["backward"].waits
    assert sum(phases["step"].waits.values()) <= 1, phases["step"].waits


@pytest.mark.parametrize("per", ["model", "tensor"])
def test_launches_with_totals(per):
    """No operator of a step runs once for each parameter; in a backward, few do."""
    torch.set_default_dtype(torch.float32)
    options = {"lr": 0.01, "momentum": 0.9, "per": "model"}
    kinds = {}
    for layers in (1, 2):
        model = GPT(layers=layers, width=32, heads=2, vocabulary=256, context=64)
        w = Workload("tokens", lambda model=model: model, text(8, 16), per_token)
        phases = counted(w, varreg.VRSGD, options, observe=True, observed={"per": per})
        kinds[layers] = phases["step"].launched
    assert kinds[2] - kinds[1] <= 4, kinds  # a layer has 12 parameters


MOST_LAUNCHES = {("GPT", "SGD, momentum"): 1.80, ("GPT", "Adam"): 1.83}
MOST_LAUNCHES |= {("paper's CNN", "SGD, momentum"): 1.86, ("paper's CNN", "Adam"): 2.00}
SMALL = {"GPT": text(2, 32), "paper's CNN": images(16, 1, 28, 28)}


@pytest.mark.parametrize(("model", "optimizer"), MOST_LAUNCHES)
def test_launches_over_plain_training(model, optimizer):
    """The table of the docs has what is counted. It was counted with larger batches: how many
    launches there are does not depend on the batch.
    """
    torch.set_default_dtype(torch.float32)
    w = next(w for w in WORKLOADS.values() if w.name.startswith(model))
    w = w._replace(batch=SMALL[model])
    rows, ratio = launches.rows(w, optimizer)
    assert ratio <= MOST_LAUNCHES[model, optimizer] + 0.005, rows
    saved = json.loads(launches.RESULTS.read_text())["rows"]
    assert [row for row in saved if row in rows] == rows


def test_what_is_counted_is_asked_of_the_device():
    """One launch of each of two operators, and a wait for a value."""
    with pretend_device.count() as count:
        x = torch.ones(3, device=DEVICE)
        assert float((x + x).sum()) == 6
    assert count.launches["aten::add"] == count.launches["aten::sum"] == 1
    assert sum(count.waits.values()) == 1


def test_changes_without_a_trace_are_seen():
    torch.set_default_dtype(torch.float32)
    lams = []
    for write in (lambda g: g.mul_(0.5), lambda g: g.data.mul_(0.5)):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2).to(DEVICE)
        varreg.observe(layer)
        optimizer = varreg.VRSGD(layer.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.randn(4, 3, device=DEVICE)).square().mean().backward()
            for p in layer.parameters():
                write(p.grad)
            optimizer.step()
        lams.append([optimizer.lambda_of(p) for p in layer.parameters()])
    torch.testing.assert_close(lams[0], lams[1], rtol=0, atol=0)


def test_a_gradient_that_is_written_to_leaves_the_moments():
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(DEVICE)
    varreg.observe(model)
    model(torch.randn(5, 3, device=DEVICE)).square().mean().backward()
    before = [varreg.moments(p).total.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad.zero_()
        p.grad.add_(1)
    for p, total in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(varreg.moments(p).total, total, rtol=0, atol=0)


def test_a_fused_base_waits_once():
    torch.set_default_dtype(torch.float32)
    layer = nn.Linear(3, 2).to(DEVICE)
    varreg.observe(layer)
    optimizer = varreg.VRAdam(layer.parameters(), lr=0.01)
    for p in layer.parameters():  # as a fused base keeps its count of steps
        optimizer.state[p].update(
            step=torch.zeros((), device=DEVICE),
            exp_avg=torch.zeros_like(p),
            exp_avg_sq=torch.zeros_like(p),
        )
    optimizer.param_groups[0]["foreach"] = False
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(4, 3, device=DEVICE)).square().mean().backward()
        with pretend_device.count() as count:
            optimizer.step()
    ours = [line for line in count.waits if "optim/base.py" not in line]  # torch's own step
    assert len(ours) <= 1, count.waits


def test_clearing_in_place_waits_once_for_all():
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))).to(DEVICE)
    varreg.observe(model)
    optimizer = varreg.VRSGD(model.parameters(), lr=0.01)
    x = torch.randn(6, 4, device=DEVICE)
    for _ in range(4):
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        with pretend_device.count() as count:
            loss.backward()
        optimizer.step()
        assert varreg.moments(model[0].weight).count == 6
    assert sum(count.waits.values()) <= 1, count.waits


# ---- several processes ---------------------------------------------------------------------------


@pytest.fixture
def _two_ranks(monkeypatch):
    """A group of two, of which this is one, and the other adds zeros: the device has no network."""
    dist.init_process_group("cpu:fake,pretend:fake", store=FakeStore(), rank=0, world_size=2)
    reduce = dist.all_reduce

    def all_reduce(t, *args, async_op=False, **kwargs):
        work = reduce(t, *args, async_op=async_op, **kwargs)
        if not async_op:
            return work
        future = torch.futures.Future()  # the fake group's own has no value
        future.set_result([t])
        return SimpleNamespace(get_future=lambda: future)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    yield
    dist.destroy_process_group()


def _distributed(model):
    return nn.parallel.DistributedDataParallel(model)


NEEDS_NO_STREAMS = pytest.mark.skipif(
    hasattr(torch.ops.fsdp, "record_grad_output_stream"),
    reason="torch 2.15 asks for the number of a stream, and the pretend device has no streams",
)


def _sharded(model):
    return fully_shard(model, mesh=init_device_mesh(DEVICE, (2,)))


@pytest.mark.usefixtures("_two_ranks")
@pytest.mark.filterwarnings("ignore")  # of ranks that never answer
@pytest.mark.parametrize(
    "wrapped", [_distributed, pytest.param(_sharded, marks=[NEEDS_FSDP, NEEDS_NO_STREAMS])]
)
def test_nothing_waits_inside_of_reductions(wrapped):
    torch.set_default_dtype(torch.float32)
    model = wrapped(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(DEVICE))
    varreg.observe(model)
    x = torch.randn(8, 4, device=DEVICE)
    merged = 0
    for _ in range(5):
        model.zero_grad()
        loss = model(x).square().mean()
        with pretend_device.count() as count:
            loss.backward()
        ledgers = LEDGERS.find(list(model.parameters()))
        merged += sum(bool(ledger.unread) for ledger in ledgers)
    assert merged  # the numbers of the other rank are there, and nobody has looked
    assert not count.waits


# ---- late errors ---------------------------------------------------------------------------------


def test_a_gradient_from_outside_is_an_error_in_the_step():
    layer = nn.Linear(3, 2).to(DEVICE)
    varreg.observe(layer)
    optimizer = varreg.VRSGD(layer.parameters(), lr=0.01)
    loss = layer(torch.randn(4, 3, device=DEVICE)).square().mean()
    (loss + layer.weight.square().sum()).backward()
    with pytest.raises(MeasurementError, match="from outside"):
        optimizer.step()


def test_gradients_cleared_without_a_trace_are_an_error():
    layer = nn.Linear(3, 2).to(DEVICE)
    varreg.observe(layer)
    x = torch.randn(4, 3, device=DEVICE)
    layer(x).square().mean().backward()
    for p in layer.parameters():
        p.grad.data.zero_()
    layer(x).square().mean().backward()
    with pytest.raises(MeasurementError, match="zero_grad"):
        varreg.moments(layer.weight)


def test_positions_that_repeat_later_are_an_error_once():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.ids = nn.Embedding(5, 4), torch.arange(3, device=DEVICE)

        def forward(self, x):
            return (x + self.table(self.ids)).square().sum((1, 2))

    model = Positions().to(DEVICE)
    varreg.observe(model)
    x = torch.randn(6, 3, 4, device=DEVICE)
    model(x).mean().backward()
    varreg.moments(model.table.weight)
    model.ids = torch.tensor([1, 1, 2], device=DEVICE)
    model.zero_grad()
    model(x).mean().backward()
    with pytest.raises(MeasurementError, match="twice"):
        varreg.moments(model.table.weight)
    model.zero_grad()
    model(x).mean().backward()
    each = torch.zeros(6, 5, 4, device=DEVICE)
    for i in range(6):
        table = model.table.weight.detach().clone().requires_grad_()
        (x[i] + F.embedding(model.ids, table)).square().sum().backward()
        each[i] = table.grad
    m = varreg.moments(model.table.weight)
    torch.testing.assert_close(m.variance, each.var(0, correction=0))


def test_clipping_by_value_is_as_on_the_cpu():
    here = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    there = copy.deepcopy(here).to(DEVICE)
    lams = []
    for model in (here, there):
        varreg.observe(model)
        optimizer = varreg.VRSGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(4)
        for _ in range(4):
            x = torch.randn(8, 4, device="cpu").to(next(model.parameters()).device)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.02)
            with pretend_device.count() as count:
                optimizer.step()
        lams.append([optimizer.lambda_of(p).cpu() for p in model.parameters()])
    assert sum(count.waits.values()) <= 1, count.waits
    torch.testing.assert_close(lams[1], lams[0])


# ---- varreg bench --------------------------------------------------------------------------------


@pytest.mark.usefixtures("_no_float64")
def test_bench_checks_and_measures_on_a_device(tmp_path):
    torch.set_default_dtype(torch.float32)
    saved = tmp_path / "bench.json"
    tiny = [
        "--model",
        "torch.nn:Linear,in_features=4,out_features=3",
        "--input",
        "4",
        "--classes",
        "3",
    ]
    how = [
        "--batch-size",
        "8",
        "--seconds",
        "0.02",
        "--threads",
        "1",
        "--groups",
        "exact",
        "--device",
        "pretend",
    ]
    done = CliRunner().invoke(app, ["bench", *tiny, *how, "--json", str(saved)])
    assert done.exit_code == 0, done.output
    assert "pretend" in done.output
    assert "MiB" in done.output
    record = json.loads(saved.read_text())
    assert record["environment"]["device"] == "pretend"
    kernels = {"status": "there are no kernels for pretend", "triton": False}
    assert record["environment"]["device_kernels"] == kernels
    assert "pretend, no kernels (there are" in record["measured"]
    assert record["rows"][0]["bytes"]["exact"][0] > record["rows"][0]["bytes"]["plain"][0] > 0
