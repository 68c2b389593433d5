"""The monitor: what it records, what its file survives, and what it costs."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import varreg
from tests.support.commands import wait_for
from varreg.monitor import Recorder, read
from varreg.monitor.journal import Journal, Log
from varreg.monitor.measured_step import scalars
from varreg.monitor.pace import Pace
from varreg.noise import gauges
from varreg.thresholds import NUMBER_DIGITS

CLOSE = 0.5 * 10.0 ** (1 - NUMBER_DIGITS)  # what rounding to so many digits may change


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batches(n: int, size: int = 16):
    for _ in range(n):
        yield torch.randn(size, 6), torch.randint(0, 3, (size,))


def backward(model, batch) -> torch.Tensor:
    x, y = batch
    loss = nn.functional.cross_entropy(model(x), y)
    model.zero_grad()
    loss.backward()
    return loss


def test_what_is_recorded_is_what_was_measured(tmp_path):
    """Against the public functions, each of which has its own test against the definition."""
    model = small()
    observer = varreg.observe(model)
    optimizer = varreg.VRSGD(model.parameters(), lr=0.1)
    noise = varreg.NoiseScale(observer)
    expected = []
    monitor = varreg.Monitor(observer, optimizer, tmp_path, every=1, layers=True)
    for batch in batches(30):
        loss = backward(model, batch)
        noise.update()
        optimizer.step()
        monitor.step(loss)
        summary, lam = observer.summary(), optimizer.lambda_summary().model
        parts = [varreg.moments(p) for p in model.parameters()]
        low, high = noise.interval
        q10, q50, q90 = lam.quantiles
        expected.append(
            {
                "loss": loss.item(),
                "lr": 0.1,
                "batch": 16,
                "grad_norm": summary.model.grad_norm,
                "grad_error": math.sqrt(summary.model.trace / 16),
                "snr": summary.model.snr,
                "norm_test": gauges.norm_test(parts),
                "gsnr": gauges.gsnr(parts),
                "evidence": gauges.evidence(parts),
                "cabs": gauges.cabs(parts, 0.1, loss.item()),
                "noise_scale": noise.value,
                "noise_scale_low": low,
                "noise_scale_high": high,
                "lambda_effective": lam.effective,
                "lambda_mean": lam.mean,
                "lambda_q10": q10,
                "lambda_q50": q50,
                "lambda_q90": q90,
                "layer_snr": [r.snr for r in summary.layers],
                "layer_noise_scale": [r.value for r in noise.layers],
                "noise_layers": [i for i, r in enumerate(noise.layers) if r.interval[0] > 16],
                "signal_layers": [i for i, r in enumerate(noise.layers) if r.interval[1] < 16],
            }
        )
    monitor.close()
    log = read(tmp_path)
    assert log.layers == ["0", "2"]
    assert [r["step"] for r in log.records] == list(range(1, 31))
    for found, wanted in zip(log.records, expected, strict=True):
        assert set(found) == {*wanted, "step", "time"}
        for name, value in wanted.items():
            assert found[name] == pytest.approx(value, rel=CLOSE), name
    assert log.end["end"] == "ended"


@pytest.mark.parametrize("per", ["element", "tensor", "model"])
def test_lambda_of_the_whole_model_alone(per, monkeypatch):
    """As in the full summary; and the quantiles of a sample are near."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 3))
    varreg.observe(model)
    optimizer = varreg.VRAdam(model.parameters(), lr=0.1, per=per)
    for batch in batches(3):
        backward(model, batch)
        optimizer.step()
    full, quick = optimizer.lambda_summary(), optimizer.lambda_summary(parameters=False)
    assert quick.parameters == []
    assert quick.model.elements == full.model.elements
    assert quick.model.quantiles == full.model.quantiles
    assert quick.model.mean == pytest.approx(full.model.mean, rel=1e-12)
    assert quick.model.effective == pytest.approx(full.model.effective, rel=1e-12)
    monkeypatch.setattr("varreg.optim.lambda_summary.LAMBDA_SAMPLE", 100)
    each = torch.cat([optimizer.lambda_of(p).expand(p.shape).flatten() for p in model.parameters()])
    found = optimizer.lambda_summary(False).model.quantiles
    for x, q in zip(found, (0.1, 0.5, 0.9), strict=True):
        below, up_to = (each < x).double().mean(), (each <= x).double().mean()
        assert below - 0.15 <= q <= up_to + 0.15
    optimizer.zero_grad()
    assert math.isnan(optimizer.lambda_summary(False).model.effective)


def test_without_lambda_where_there_is_none(tmp_path):
    model = small()
    observer, optimizer = varreg.observe(model), torch.optim.Adam(model.parameters())
    with varreg.Monitor(observer, optimizer, tmp_path / "a.html", every=1) as monitor:
        for batch in batches(3):
            loss = backward(model, batch)
            optimizer.step()
            monitor.step(loss)
    assert {p.name for p in tmp_path.iterdir()} == {"a.html", "a.jsonl"}
    for record in read(tmp_path / "a.html").records:
        assert not [name for name in record if name.startswith(("lambda", "layer_"))]


def test_with_follows_the_optimizer(tmp_path):
    """Without step(); gradients may be cleared at once; and the optimizer is left alone after."""
    model = small()
    observer, optimizer = varreg.observe(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with varreg.Monitor(observer, optimizer, tmp_path, every=2):
        for batch in batches(6):
            backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
    records = read(tmp_path).records
    assert [r["step"] for r in records] == [1, 2, 4, 6]
    assert all("loss" not in r and r["snr"] > 0 for r in records)
    assert not optimizer._optimizer_step_post_hooks


def test_wrapped_optimizers(tmp_path):
    """AdaScale, and what frameworks wrap: the one that steps is followed."""
    model = small()
    observer, inner = varreg.observe(model), varreg.VRSGD(model.parameters(), lr=0.1)
    ada = varreg.AdaScale(inner, base_batch=8)
    with varreg.Monitor(observer, ada, tmp_path, every=1):
        for batch in batches(2):
            backward(model, batch)
            ada.step()
    assert "lambda_effective" in read(tmp_path).records[-1]


def test_misuse(tmp_path):
    model = small()
    observer, optimizer = varreg.observe(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(varreg.VarregError, match="every must be a positive whole number"):
        varreg.Monitor(observer, optimizer, tmp_path, every=0)
    with pytest.raises(varreg.VarregError, match=r"expects a torch\.optim\.Optimizer"):
        varreg.Monitor(observer, 3, tmp_path)
    with pytest.raises(varreg.VarregError, match="expects the observer"):
        varreg.Monitor(model, optimizer, tmp_path)
    monitor = varreg.Monitor(observer, optimizer, tmp_path, every=1)
    with pytest.raises(varreg.VarregError, match=r"before\s+zero_grad\(\)"):
        monitor.step(1.0)
    loss = backward(model, next(batches(1)))
    with pytest.raises(varreg.VarregError, match=r"got Tensor of shape \(2,\)"):
        monitor.step(loss.expand(2))
    observer.remove()
    with pytest.raises(varreg.VarregError, match="observer was removed"):
        monitor.step(1.0)
    monitor.close()
    monitor.close()


def test_a_file_of_something_else_is_left_alone(tmp_path):
    model = small()
    observer, optimizer = varreg.observe(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for content in (b"mine", b"mine\n", b'{"step": 1}\n', b'{"session":{"format":1,\n{}\n'):
        path = tmp_path / "monitor.jsonl"
        path.write_bytes(content)
        with pytest.raises(varreg.VarregError, match="was not written by a Monitor"):
            varreg.Monitor(observer, optimizer, tmp_path)
        assert path.read_bytes() == content


def run(model, optimizer, monitor, n: int) -> None:
    for batch in batches(n):
        loss = backward(model, batch)
        optimizer.step()
        monitor.step(loss)


def test_resuming_appends(tmp_path):
    model = small()
    observer, optimizer = varreg.observe(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with varreg.Monitor(observer, optimizer, tmp_path, every=1) as monitor:
        run(model, optimizer, monitor, 5)
        saved = monitor.state_dict()
        run(model, optimizer, monitor, 3)
    first = (tmp_path / "monitor.jsonl").read_bytes()
    with varreg.Monitor(observer, optimizer, tmp_path, every=1) as monitor:
        run(model, optimizer, monitor, 2)
    assert (tmp_path / "monitor.jsonl").read_bytes().startswith(first)
    assert [r["step"] for r in read(tmp_path).records] == list(range(1, 11))
    with varreg.Monitor(observer, optimizer, tmp_path, every=1) as monitor:
        monitor.load_state_dict(saved)  # a run that was lost after its fifth step
        assert monitor.noise.updates == 5
        run(model, optimizer, monitor, 2)
    assert [r["step"] for r in read(tmp_path).records] == list(range(1, 8))
    with varreg.Monitor(observer, optimizer, tmp_path, every=1, resume=False) as monitor:
        run(model, optimizer, monitor, 1)
        with pytest.raises(varreg.VarregError, match=r"expects the result of state_dict\(\)"):
            monitor.load_state_dict({})
    assert len(read(tmp_path).records) == 1


def test_cut_off_at_every_byte(tmp_path):
    """What is whole is kept, what is torn is dropped, and the next line is whole."""
    path = tmp_path / "monitor.jsonl"
    journal = Journal(path)
    journal.append({"session": {"format": 1, "id": "a", "after": 0}})
    journal.append({"layers": ["é"]})
    for step in (1, 2):
        journal.append({"step": step, "loss": math.inf, "snr": [math.nan, 0.5]})
    journal.close()
    content = path.read_bytes()
    for n in range(len(content) + 1):
        path.write_bytes(content[:n])
        again = Journal(path)
        kept = content[:n].count(b"\n")
        assert path.read_bytes() == b"".join(content.splitlines(keepends=True)[:kept])
        again.append({"session": {"format": 1, "id": "b", "after": 9}})
        again.append({"step": 3})
        again.close()
        log = read(path)
        assert log.steps == 3
        assert len(log.records) == max(0, kept - 2) + 1
    assert math.isinf(log.records[0]["loss"])
    assert math.isnan(log.records[0]["snr"][0])


LOOP = """
import sys, torch, varreg
model = torch.nn.Linear(6, 3)
observer = varreg.observe(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = varreg.Monitor(observer, optimizer, sys.argv[1], every=1)
for step in range(int(sys.argv[2])):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 6)).square().mean()
    loss.backward()
    optimizer.step()
    monitor.step(loss)
"""


def test_killed(tmp_path):
    """By force, while it writes: the file and the page are whole, and a new process goes on."""
    path = tmp_path / "monitor.jsonl"
    endless = str(10**12)  # on the fastest machine, too, it is killed and does not end by itself
    process = subprocess.Popen([sys.executable, "-c", LOOP, str(tmp_path), endless], text=True)
    try:
        wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= 12, process)
    finally:
        process.kill()  # also after a failure: it would train on
        process.wait()
    log = read(tmp_path)
    steps = [r["step"] for r in log.records]
    assert steps == list(range(1, len(steps) + 1))
    assert log.end is None
    page = (tmp_path / "monitor.html").read_text()
    assert page.rstrip().endswith("</html>")
    subprocess.run([sys.executable, "-c", LOOP, str(tmp_path), "3"], check=True)
    log = read(tmp_path)
    assert [r["step"] for r in log.records] == list(range(1, len(steps) + 4))
    assert log.end["end"] == "ended"  # at the end of the process, without close()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_how_it_ended(tmp_path):
    model = small()
    observer, optimizer = varreg.observe(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ZeroDivisionError), varreg.Monitor(observer, optimizer, tmp_path):
        _ = 1 / 0
    assert read(tmp_path).end["end"] == "stopped by ZeroDivisionError"
    first = varreg.Monitor(observer, optimizer, tmp_path)  # a cell that is run twice
    second = varreg.Monitor(observer, optimizer, tmp_path)
    first.close()
    assert read(tmp_path).end is None
    second.close()
    assert read(tmp_path).end["end"] == "ended"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full: /dev/full")
def test_a_full_disk_does_not_end_training(tmp_path, monkeypatch):
    model = small()
    observer, optimizer = varreg.observe(model), torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = varreg.Monitor(observer, optimizer, tmp_path, every=1)
    run(model, optimizer, monitor, 2)
    journal = monitor._publisher.journal
    kept, full = journal._file, os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(os, "ftruncate", lambda *_: None)  # a device has no length
    journal._file = full
    with pytest.warns(UserWarning, match="the monitor cannot write .*No space left"):
        run(model, optimizer, monitor, 2)
    journal._file = kept
    os.close(full)
    run(model, optimizer, monitor, 1)
    monitor.close()
    assert [r["step"] for r in read(tmp_path).records] == [1, 2, 5]


@pytest.mark.parametrize("step_time", [0.001, 0.05, 0.4])
def test_at_most_one_percent(step_time):
    """However long steps and records take, and though both change; by a clock that is set."""
    now = [0.0]
    pace = Pace(None, clock=lambda: now[0])
    costs = torch.rand(10_000, generator=torch.Generator().manual_seed(0)).mul(0.02).tolist()
    spent = recorded = 0.0
    for step in range(1, 10_000):
        now[0] += step_time * (3 if step > 5000 else 1)
        if pace.is_due(step):
            cost = costs.pop()
            now[0] += cost
            pace.rest(step, cost)
            recorded += 1
            spent += cost if recorded > 1 else 0.0
    assert recorded > 3
    assert 0.005 < spent / now[0] <= 0.0101
    assert pace.spent_share == pytest.approx(spent / now[0], rel=0.02)


def test_agreed_steps():
    pace = Pace(None)
    pace.agree(7)
    assert [step for step in range(10) if pace.is_due(step)] == [7, 8, 9]


def test_long_runs_keep_the_page_small():
    log = Log(most=100)
    log.add('{"session":{"format":1,"id":"a","after":0}}')
    for step in range(1, 3_210):
        log.add(json.dumps({"step": step}))
        assert log.steps == step
        assert len(log.lines) <= 100
    steps = [r["step"] for r in log.records]
    gaps = {b - a for a, b in itertools.pairwise(steps[:-1])}
    assert gaps == {max(gaps)}
    assert len(steps) > 45


def test_scalars_are_finite():
    values = {"step": 1, "time": 2.0, "loss": math.nan, "noise_scale": math.inf, "snr": 1.5}
    assert scalars(values, prefix="x/") == {"x/snr": 1.5}
    assert scalars({"layer_snr": [1.0, math.inf], "noise_layers": [0]}, ["a", "b"]) == {
        "layers/a/snr": 1.0,
        "noise_layers": 1.0,
    }


def test_a_batch_of_one_has_a_loss_alone(tmp_path):
    model = small()
    observer, optimizer = varreg.observe(model), torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = varreg.Monitor(observer, optimizer, tmp_path, every=1)
    loss = backward(model, next(batches(1, size=1)))
    with pytest.warns(UserWarning, match="a batch of one"):
        monitor.step(loss)
    monitor.close()
    (record,) = read(tmp_path).records
    assert set(record) == {"step", "time", "loss", "lr"}


def test_pandas(tmp_path):
    model = small()
    observer, optimizer = varreg.observe(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with varreg.Monitor(observer, optimizer, tmp_path, every=1, layers=True) as monitor:
        run(model, optimizer, monitor, 4)
    pytest.importorskip("pandas")
    frame = monitor.to_pandas()
    records = read(tmp_path).records
    assert frame.index.tolist() == [1, 2, 3, 4]
    assert frame["loss"].tolist() == [r["loss"] for r in records]
    assert frame["layer_snr/2"].tolist() == [r["layer_snr"][1] for r in records]


def test_without_pandas(tmp_path, monkeypatch):
    model = small()
    observer, optimizer = varreg.observe(model), torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = varreg.Monitor(observer, optimizer, tmp_path)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        monitor.to_pandas()
    monitor.close()


def test_gradients_are_not_touched(tmp_path):
    """Training is the same to the bit, with a monitor and without."""
    ends = []
    for path in (None, tmp_path):
        model = small()
        optimizer = varreg.VRSGD(model.parameters(), lr=0.1, momentum=0.9)
        observer = varreg.observe(model)
        torch.manual_seed(1)
        recorder = None if path is None else varreg.Monitor(observer, optimizer, path, every=1)
        for batch in batches(10):
            loss = backward(model, batch)
            optimizer.step()
            if recorder is not None:
                recorder.step(loss)
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_recorder_alone():
    """What loggers are made of."""
    model, found = small(), []
    observer = varreg.observe(model)
    recorder = Recorder(observer, None, found.append, every=3)
    for batch in batches(6):
        recorder.step(backward(model, batch))
    assert [r["step"] for r in found] == [1, 3, 6]
    assert "lr" not in found[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": None}, "expects the path of a folder"),
        ({"path": 3}, "expects the path of a folder"),
        ({"resume": "no"}, "resume must be True or False"),
        ({"title": 3}, "title must be a string"),
        ({"layers": "conv1"}, "layers must be True or False"),
        ({"window": 1}, "window must be a whole number"),
    ],
)
def test_arguments_of_another_type(tmp_path, options, words):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"path": tmp_path / "new", **options}
    with pytest.raises(varreg.VarregError, match=words):
        varreg.Monitor(varreg.observe(model), optimizer, **given)
    assert not (tmp_path / "new").exists()


def test_places_where_nothing_can_be_written(tmp_path):
    model = small()
    observer, optimizer = varreg.observe(model), torch.optim.SGD(model.parameters(), lr=0.1)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder" / "monitor.jsonl").mkdir(parents=True)
    for path in ("file", "file/below", "folder"):
        with pytest.raises(varreg.VarregError, match=r"cannot write to .*Choose a folder"):
            varreg.Monitor(observer, optimizer, tmp_path / path)
        with pytest.raises(varreg.VarregError, match=r"cannot read .*same path as for the Monitor"):
            read(tmp_path / path)
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(varreg.VarregError, match="read expects the path"):
        read(3)
    # Monitors of other tests may still wait for the garbage collector: only these paths count.
    assert not [path for path in varreg.monitor.publisher._OPEN if tmp_path in path.parents]


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only(tmp_path):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tmp_path.chmod(0o500)
    with pytest.raises(varreg.VarregError, match=r"cannot write to .*Permission denied"):
        varreg.Monitor(varreg.observe(model), optimizer, tmp_path / "run")


def test_a_closed_monitor_says_so(tmp_path):
    """It was a warning about a "bad file descriptor", and nothing was recorded."""
    model = small()
    observer, optimizer = varreg.observe(model), torch.optim.SGD(model.parameters(), lr=0.1)
    closed = varreg.Monitor(observer, optimizer, tmp_path / "a", every=1)
    state = closed.state_dict()
    closed.close()
    replaced = varreg.Monitor(observer, optimizer, tmp_path / "b", every=1)
    new = varreg.Monitor(observer, optimizer, tmp_path / "b", every=1)
    loss = backward(model, next(batches(1)))
    for monitor in (closed, replaced):
        assert "ended" in repr(monitor)
        for use in (functools.partial(monitor.step, loss), monitor.__enter__):
            with pytest.raises(varreg.VarregError, match="was closed, or another one"):
                use()
        with pytest.raises(varreg.VarregError, match="was closed, or another one"):
            monitor.load_state_dict(state)
    assert "running" in repr(new)
    new.step(loss)
    new.close()
    assert len(read(tmp_path / "b").records) == 1


def test_pandas_before_the_first_record(tmp_path):
    pytest.importorskip("pandas")
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with varreg.Monitor(varreg.observe(model), optimizer, tmp_path) as monitor:
        frame = monitor.to_pandas()
    assert len(frame) == 0
    assert frame.index.name == "step"
