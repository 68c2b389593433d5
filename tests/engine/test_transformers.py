"""A real client: Hugging Face's GPT-2, with tied embeddings, its own Conv1D layer and a position
embedding.
"""

from __future__ import annotations

import copy

import pytest
import torch

import varreg
from tests.support.truth import assert_close, sample_weights, scale_of

transformers = pytest.importorskip("transformers")
BATCH = 5


def gpt2(**options):
    config = transformers.GPT2Config(
        vocab_size=13,
        n_positions=8,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **options,
    )
    return transformers.GPT2LMHeadModel(config).double()


def token_losses(logits, ids, w):
    each = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return w * each.view(len(ids), -1).square().sum(1)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [6, BATCH], ids=["", "as many positions as samples"])
@pytest.mark.parametrize("mask", [False, True], ids=["", "padding"])
def test_gpt2_is_exact(attention, length, mask):
    model = gpt2(attn_implementation=attention)
    ids, w = torch.randint(0, 13, (BATCH, length)), sample_weights(BATCH)
    padding = torch.ones_like(ids)
    if mask:
        padding[1, 4:] = padding[3, 3:] = 0
    plain = copy.deepcopy(model)
    rows = []
    for i in range(BATCH):
        plain.zero_grad()
        out = plain(input_ids=ids[i : i + 1], attention_mask=padding[i : i + 1] if mask else None)
        token_losses(out.logits, ids[i : i + 1], w[i : i + 1]).sum().backward()
        rows.append({n: p.grad for n, p in plain.named_parameters()})
    g = {n: torch.stack([r[n] for r in rows]) for n in rows[0]}
    observer = varreg.observe(model)
    out = model(input_ids=ids, attention_mask=padding if mask else None)
    token_losses(out.logits, ids, w).mean().backward()
    scale = scale_of(g)
    assert model.lm_head.weight is model.transformer.wte.weight
    for name, p in model.named_parameters():
        m = varreg.moments(p)
        assert m.count == BATCH
        assert_close(m.mean, g[name].mean(0), scale, f"{name}: mean")
        assert_close(m.second_moment, g[name].square().mean(0), scale**2, f"{name}: second moment")
    served = {row[0]: row[2] for row in observer.coverage()}
    assert served["transformer.wte.weight"] == "embedding + linear"
    assert served["transformer.h.0.attn.c_attn.weight"] == "addmm"


def test_gpt2_trains_with_its_own_loss():
    model = gpt2()
    varreg.observe(model)
    ids = torch.randint(0, 13, (BATCH, 6))
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(varreg.moments(p) is not None for p in model.parameters())


def t5(**options):
    config = transformers.T5Config(
        vocab_size=13,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        **options,
    )
    return transformers.T5ForConditionalGeneration(config).double()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_t5_is_exact(attention):
    """Its position biases are parameters, and are added to what attention makes of the batch."""
    model = t5(attn_implementation=attention, dropout_rate=0.0)
    ids, labels = torch.randint(0, 13, (BATCH, 6)), torch.randint(0, 13, (BATCH, 4))
    rows = []
    for i in range(BATCH):
        model.zero_grad()
        model(input_ids=ids[i : i + 1], labels=labels[i : i + 1]).loss.backward()
        rows.append({n: p.grad for n, p in model.named_parameters()})
    g = {n: torch.stack([r[n] for r in rows]) for n in rows[0]}
    model.zero_grad()
    varreg.observe(model)
    model(input_ids=ids, labels=labels).loss.backward()
    scale = scale_of(g)
    for name, p in model.named_parameters():
        m = varreg.moments(p)
        assert_close(m.mean, g[name].mean(0), scale, f"{name}: mean", rtol=1e-6)
        assert_close(
            m.second_moment, g[name].square().mean(0), scale**2, f"{name}: second moment", rtol=1e-6
        )


def mixtral(experts, **options):
    sizes = {
        "vocab_size": 13,
        "hidden_size": 8,
        "intermediate_size": 6,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
        "max_position_embeddings": 16,
    }
    config = transformers.MixtralConfig(**sizes | options)
    model = transformers.MixtralForCausalLM(config)
    if not hasattr(model, "set_experts_implementation"):
        pytest.skip("this version of transformers has no implementations of experts to choose from")
    model.set_experts_implementation(experts)
    return model


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize(("batch", "length"), [(4, 4), (3, 5), (2, 1), (1, 5)])
def test_mixtral_is_exact(experts, top, batch, length):
    """Its experts are slices of one parameter, and its router works in float32: hence the
    tolerance.
    """
    model = mixtral(experts, num_experts_per_tok=top).double()
    plain, w = copy.deepcopy(model), sample_weights(batch)
    with varreg.observe(model):
        for _ in range(2):
            ids = torch.randint(0, 13, (batch, length))
            rows = []
            for i in range(batch):
                plain.zero_grad()
                (w[i] * plain(ids[i : i + 1]).logits.square().sum()).backward()
                rows.append({n: p.grad for n, p in plain.named_parameters()})
            g = {
                n: torch.stack([torch.zeros_like(p) if r[n] is None else r[n] for r in rows])
                for n, p in plain.named_parameters()
            }
            model.zero_grad()
            (w * model(ids).logits.square().sum((1, 2))).mean().backward()
            scale = scale_of(g)
            for name, p in model.named_parameters():
                m, squares = varreg.moments(p), g[name].square().mean(0)
                assert m.count == batch
                for got, want, size in (
                    (m.mean, g[name].mean(0), scale),
                    (m.second_moment, squares, scale**2),
                ):
                    gap = float((got - want).abs().max())
                    assert gap <= 1e-5 * float(want.abs().max()) + 1e-9 * size, name


@pytest.mark.parametrize("frozen", ["", "experts"])
def test_mixtral_with_grouped_products_is_refused_with_a_remedy(frozen):
    model = mixtral("grouped_mm").float()
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen or frozen not in name)
    varreg.observe(model)
    with pytest.raises(ValueError, match=r"experts.*call model\.set_experts_implementation"):
        model(torch.randint(0, 13, (3, 4)))


def test_t5_with_dropout_in_fused_attention_is_refused():
    ids = torch.randint(0, 13, (BATCH, 6))
    for attention in ("eager", "sdpa"):
        model = t5(attn_implementation=attention)
        varreg.observe(model)
        loss = model(input_ids=ids, labels=ids).loss
        if attention == "eager":
            loss.backward()
            assert all(varreg.moments(p) is not None for p in model.parameters())
        else:
            with pytest.raises(RuntimeError, match="it mixes samples or is random"):
                loss.backward()
