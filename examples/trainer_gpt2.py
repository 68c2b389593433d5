"""Variance regularization in the Hugging Face Trainer: a tiny GPT-2 learns to spell from the
docstrings of Python's own types.

What a sample is here. The Trainer divides the summed losses of all tokens by their number N, over
all micro-batches of a step. So the loss is a mean over tokens, and over samples only with weights:
sample i, of nᵢ tokens, contributes cᵢ = Σₜ∇ℓᵢₜ/N, and varreg's gᵢ = m·cᵢ is the gradient of its
summed token losses over the mean length N/m. The moments are exact for that: ḡ is the gradient that
the Trainer uses, accumulated or not. But a long text then has a long gradient, so v² also holds how
lengths differ: were all tokens' gradients the same, ρ would be the squared coefficient of variation
of the lengths, not 0. `group_by_length`, or texts cut to one length, takes that out.
"""

from __future__ import annotations

import argparse
import builtins
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import varreg

LENGTH = 48


def texts() -> list[Tensor]:
    """Return what the methods of Python's types say of themselves, a line each, as bytes: texts of
    many lengths.
    """
    kinds = [kind for kind in vars(builtins).values() if isinstance(kind, type)]
    lines = {
        (inspect.getdoc(method) or "").partition("\n")[0]
        for kind in kinds
        for method in vars(kind).values()
    }
    return [torch.tensor(list(line.encode()[:LENGTH])) for line in sorted(lines) if len(line) > 8]


def collate(batch: list[Tensor]) -> dict[str, Tensor]:
    """Pad texts to one length; there is no loss for the padding."""
    ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(text) for text in batch], batch_first=True
    )
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class RegularizedTrainer(Trainer):
    """A Trainer with λ in the log, and so in all that it reports to."""

    def log(self, logs: dict[str, float], *rest: Any) -> None:
        whole = (
            self.optimizer.optimizer.lambda_summary().model if "loss" in logs else None
        )  # Accelerate has wrapped ours
        if whole:
            logs["lambda"] = whole.mean
        super().log(logs, *rest)


def main() -> None:
    """Train a small GPT-2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="samples in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--smoothing", type=float, default=0.0, help="of labels")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/trainer_gpt2"), help="for checkpoints"
    )
    parser.add_argument("--resume", type=Path, help="the checkpoint to go on from")
    options = parser.parse_args()
    set_seed(0)

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, **dropout, **ends
        )
    )
    # so that the Trainer does not count first tokens, which nothing predicts, into N
    model.loss_type = "ForCausalLM"
    varreg.observe(model)  # the first line, before the Trainer wraps anything
    optimizer = varreg.VRAdamW(model.parameters(), lr=3e-3)  # the second
    arguments = TrainingArguments(
        output_dir=str(options.folder),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        label_smoothing_factor=options.smoothing,
        bf16=options.bf16,
        max_grad_norm=1.0,
        logging_steps=10,
        save_steps=10,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    RegularizedTrainer(
        model,
        arguments,
        data_collator=collate,
        train_dataset=texts(),
        optimizers=(optimizer, None),  # the scheduler is the Trainer's own
    ).train(resume_from_checkpoint=str(options.resume) if options.resume else None)


if __name__ == "__main__":
    main()
