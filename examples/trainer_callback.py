"""Gradient noise in the log of a Hugging Face Trainer, with its own optimizer: one callback."""

from __future__ import annotations

import argparse
import builtins
import inspect
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from varreg.callbacks import TrainerCallback

LENGTH = 32


def texts() -> list[Tensor]:
    """Return what Python's built-in functions say of themselves, cut to one length, as bytes."""
    said = [(inspect.getdoc(thing) or "").encode() for thing in vars(builtins).values()]
    pieces = [text[i : i + LENGTH] for text in said for i in range(0, len(text), LENGTH)]
    return [torch.tensor(list(piece)) for piece in pieces if len(piece) == LENGTH]


def collate(batch: list[Tensor]) -> dict[str, Tensor]:
    """Put texts together; each token predicts the next."""
    ids = torch.stack(batch)
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    """Train a small GPT-2."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/trainer_callback"))
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    model.loss_type = "ForCausalLM"
    trainer = Trainer(
        model,
        TrainingArguments(
            str(options.folder),
            max_steps=options.steps,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            logging_steps=5,
            save_strategy="no",
            use_cpu=True,
            report_to="tensorboard",
            disable_tqdm=True,
        ),
        data_collator=collate,
        train_dataset=texts(),
    )
    TrainerCallback(options.folder).add_to(trainer)  # the line
    trainer.train()
    last = [entry for entry in trainer.state.log_history if "varreg/noise_scale" in entry][-1]
    print(f"Noise scale {last['varreg/noise_scale']:.0f}. Page: {options.folder / 'monitor.html'}")


if __name__ == "__main__":
    main()
