"""Loggers and callbacks of frameworks, each by its example, and what they have logged read back."""

from __future__ import annotations

import csv
import math
import runpy
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import varreg
from tests.support.commands import LIMIT
from varreg.monitor import read

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of protobuf, and others' own
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # Lightning's advice
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


@pytest.fixture
def example(monkeypatch, capsys, tmp_path):
    """Runs an example by itself, in a folder, and returns what it printed. Nothing that lies beside
    it can be imported.
    """

    def run(name: str, *arguments: str) -> str:
        torch.set_default_dtype(torch.float32)  # as a user has it
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, "--folder", str(tmp_path), *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def events(folder: Path) -> dict[str, dict[int, float]]:
    """All scalars of TensorBoard's files under a folder."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found: dict[str, dict[int, float]] = {}
    for path in folder.rglob("events.out.*"):
        log = accumulator.EventAccumulator(str(path)).Reload()
        for tag in log.Tags()["scalars"]:
            found.setdefault(tag, {}).update({e.step: e.value for e in log.Scalars(tag)})
    return found


def test_monitor(example, tmp_path):
    said = example("monitor_digits", "--steps", "60", "--every", "5")
    assert "60 steps, 13 records, ended" in said
    records = read(tmp_path).records
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["lambda_effective"] > 0


def test_tensorboard(example, tmp_path):
    assert "Noise scale" in example("log_tensorboard", "--steps", "30")
    found = events(tmp_path)
    assert len(found) < 20  # the whole model
    assert {tag.split("/")[0] for tag in found} == {"varreg"}
    assert list(found["varreg/loss"]) == list(found["varreg/snr"]) == [1, 10, 20, 30]
    assert all(math.isfinite(x) for values in found.values() for x in values.values())
    assert not [tag for tag in found if "lambda" in tag]  # plain Adam


def leveldb_records(content: bytes):
    """The records of a file in the log format of LevelDB, which Weights & Biases has after a header
    of 7 bytes: pieces in blocks of 32 KiB, each with a checksum, a length and a kind.
    """
    at, record = 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        if at + 7 + length > len(content):
            return  # it is being written
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last piece
            yield record
            record = b""


def history_of(path: Path) -> list[dict[str, float]]:
    """What was logged to an offline run, in its file."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in leveldb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): float(i.value_json) for i in items})
    return rows


def test_wandb(example, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    example("log_wandb", "--steps", "30")
    (path,) = tmp_path.rglob("*.wandb")
    end = time.monotonic() + LIMIT
    while len(rows := history_of(path)) < 4:  # another process writes it
        assert time.monotonic() < end, rows
        time.sleep(0.05)
    assert [row["varreg/step"] for row in rows] == [1, 10, 20, 30]
    assert rows[-1]["varreg/loss"] < rows[0]["varreg/loss"]
    assert all(math.isfinite(x) for row in rows for x in row.values())


def test_mlflow(example, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the small MLflow has no database
    example("log_mlflow", "--steps", "30", "--uri", (tmp_path / "store").as_uri())
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "varreg/loss")
    assert [m.step for m in history] == [1, 10, 20, 30]
    assert history[-1].value < history[0].value
    assert all(math.isfinite(x) for x in run.data.metrics.values())


def small():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, varreg.observe(model), torch.optim.SGD(model.parameters(), lr=0.1)


def test_loggers_that_find_no_run():
    _, observer, optimizer = small()
    pytest.importorskip("wandb")
    with pytest.raises(varreg.VarregError, match=r"wandb\.init\(\) first"):
        varreg.callbacks.WandB(observer, optimizer)
    with pytest.raises(varreg.VarregError, match=r"expects what wandb\.init\(\) returned; got str"):
        varreg.callbacks.WandB(observer, optimizer, "my-run")
    with pytest.raises(varreg.VarregError, match="expects a writer with add_scalar"):
        varreg.callbacks.TensorBoard(observer, optimizer, "runs")
    pytest.importorskip("mlflow")
    with pytest.raises(varreg.VarregError, match=r"mlflow\.start_run\(\) first"):
        varreg.callbacks.MLflow(observer, optimizer)


def test_a_logger_whose_service_is_not_installed(monkeypatch):
    _, observer, optimizer = small()
    for name, logger in (("wandb", "WandB"), ("mlflow", "MLflow")):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=f"needs {name}: pip install {name}"):
            getattr(varreg.callbacks, logger)(observer, optimizer)


def test_a_prefix_is_text():
    _, observer, optimizer = small()
    writer = type("Writer", (), {"add_scalar": lambda *_: None})()
    with pytest.raises(varreg.VarregError, match="prefix must be a string"):
        varreg.callbacks.TensorBoard(observer, optimizer, writer, prefix=3)


def test_layers_prefix_and_every():
    class Writer(dict):
        def add_scalar(self, tag, value, step):
            self.setdefault(tag, []).append(step)

    model, observer, optimizer = small()
    writer, options = Writer(), {"every": 2, "prefix": "noise.", "layers": True}
    with varreg.callbacks.TensorBoard(observer, optimizer, writer, **options) as log:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
    assert writer["noise.layers/0/snr"] == writer["noise.layers/2/snr"] == [1, 2, 4]
    assert log.recorder.steps == 4


def test_lightning(example, tmp_path):
    """Measures with a torch optimizer, from outside of a module that knows nothing of it."""
    pytest.importorskip("lightning")
    example("lightning_callback", "--epochs", "1", "--every", "10")
    log = read(tmp_path)
    steps = [r["step"] for r in log.records]
    assert steps == [1, 10, 20]
    assert log.end["end"] == "ended"
    assert all("loss" in r and "lambda_mean" not in r for r in log.records)
    (path,) = tmp_path.rglob("metrics.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [float(row["varreg/snr"]) for row in rows] == [r["snr"] for r in log.records]


@pytest.fixture
def module():
    """A LightningModule with two parts, and what quietly trains it."""
    lightning = pytest.importorskip("lightning")
    torch.set_default_dtype(torch.float32)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
            self.breaks = False

        def configure_optimizers(self):
            return varreg.VRSGD(self.parameters(), lr=0.1)

        def training_step(self, batch, index):
            if self.breaks:
                raise ZeroDivisionError
            return self(batch[0]).square().mean()

    class WithForward(Module):
        def forward(self, x):
            return self.head(self.body(x).tanh())

    def fit(module, callback, **options):
        data = torch.utils.data.TensorDataset(torch.randn(24, 3))
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        checkpoints = {"enable_checkpointing": False, "accelerator": "cpu"}
        trainer = lightning.Trainer(callbacks=[callback], **quiet, **checkpoints, **options)
        trainer.fit(module, torch.utils.data.DataLoader(data, 4))
        return trainer

    return Module, WithForward, fit


def test_lightning_accumulates_breaks_and_goes_on(module, tmp_path):
    _, with_forward, fit = module
    model, callback = with_forward(), varreg.callbacks.LightningCallback(tmp_path, every=1)
    fit(model, callback, max_epochs=1, accumulate_grad_batches=2)
    records = read(tmp_path).records
    assert [(r["step"], r["batch"]) for r in records] == [(1, 8), (2, 8), (3, 8)]
    assert all(r["lambda_mean"] > 0 for r in records)
    assert not varreg.is_observed(model.head.weight)
    fit(model, callback, max_epochs=1)  # again, by the same callback: from the first step on
    assert [r["step"] for r in read(tmp_path).records] == [1, 2, 3, 4, 5, 6]
    state = callback.state_dict()
    assert state["steps"] == 6
    assert state["noise"]["updates"] == 9
    model.breaks = True
    with pytest.raises(ZeroDivisionError):
        fit(model, callback, max_epochs=1)
    assert read(tmp_path).end["end"] == "stopped by ZeroDivisionError"
    assert not varreg.is_observed(model.head.weight)


def test_lightning_asks_which_part(module):
    without, _, fit = module
    with pytest.raises(varreg.VarregError, match=r"2 parts with parameters \(body, head\)"):
        fit(without(), varreg.callbacks.LightningCallback(), max_epochs=1)
    with pytest.raises(varreg.VarregError, match="has no part 'neck'; it has: body, head"):
        fit(without(), varreg.callbacks.LightningCallback(module="neck"), max_epochs=1)


def test_trainer(example, tmp_path):
    """In the Trainer's own report, its history and the page."""
    pytest.importorskip("transformers")
    assert "Noise scale" in example("trainer_callback", "--steps", "10")
    records = read(tmp_path).records
    assert [r["step"] for r in records] == [1, 5, 10]
    assert "loss" in records[-1]
    found = events(tmp_path)
    tag = next(tag for tag in found if tag.endswith("varreg/noise_scale_low"))
    assert list(found[tag]) == [5, 10]
    assert read(tmp_path).end["end"] == "ended"


def test_trainer_as_any_other_callback(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x):
            return {"loss": self.layer(x).square().mean()}

    model, callback = Model(), varreg.callbacks.TrainerCallback(prefix="noise.")
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, logging_steps=2, per_device_train_batch_size=4, **quiet
    )
    data = [{"x": torch.randn(3)} for _ in range(16)]
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    for _ in range(2):  # the second observes again
        trainer.train()
        history = [row for row in trainer.state.log_history if "loss" in row]
        assert [row["step"] for row in history[-2:]] == [2, 4]
        assert all(row["noise.snr"] > 0 for row in history[-2:])
        assert not varreg.is_observed(model.layer.weight)


def test_accelerate(example, tmp_path):
    """What the tracker measures is in the log of the next one."""
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()
    assert "Effective λ" in example("accelerate_tracker", "--epochs", "1", "--every", "10")
    records, found = read(tmp_path).records, events(tmp_path)
    assert [r["step"] for r in records] == [1, 10, 20]
    assert found["varreg/snr"][10] == pytest.approx(records[1]["snr"], rel=1e-6)
    assert found["loss"][10] == pytest.approx(records[1]["loss"], rel=1e-6)
    assert read(tmp_path).end["end"] == "ended"


def test_nothing_is_imported_before_it_is_asked_for():
    """By `import varreg`, nor by its callbacks before one is used."""
    frameworks = ("lightning", "transformers", "accelerate", "wandb", "mlflow", "pandas", "IPython")
    code = (
        "import sys, varreg, varreg.callbacks, varreg.tensorboard; varreg.callbacks.TensorBoard; "
        f"print([n for n in {(*frameworks, 'tensorboard', 'jinja2')} if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_framework_that_is_not_installed(monkeypatch):
    for name in ("lightning", "varreg.callbacks.in_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "varreg.callbacks.in_lightning")
    with pytest.raises(ImportError, match="needs lightning: pip install lightning"):
        _ = varreg.callbacks.LightningCallback
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = varreg.callbacks.Nothing
