"""Any module as a model: units and parameters as the engine's, counts from a trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.app.models import Decoder
from shardwright.app.plan_request import decoder_shape
from shardwright.app.presets import DecoderConfig
from shardwright.app.tracing import trace_model
from shardwright.core.errors import SpecError
from shardwright.planner.cluster import make_cluster
from shardwright.planner.cost.activation import block_kept
from shardwright.planner.huggingface import from_config
from shardwright.planner.job import Job
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.model import ModelSpec
from shardwright.planner.predict import predict
from shardwright.planner.units import find_units
from shardwright.planner.workload import SoftwareSpec, WorkloadSpec

TINY = DecoderConfig(
    vocab_size=256,
    hidden=64,
    layers=4,
    heads=4,
    kv_heads=2,
    ffn_hidden=176,
    max_seq_len=128,
)
ONE_B = DecoderConfig(
    vocab_size=32_000,
    hidden=2048,
    layers=16,
    heads=16,
    kv_heads=16,
    ffn_hidden=5632,
    max_seq_len=2048,
)


def on_meta(make):
    with torch.device("meta"):
        return make()


def tokens(batch=2, seq_len=128):
    return lambda: ((torch.zeros(batch, seq_len, dtype=torch.long),), {})


def workload(seq_len, micro_batch=2, norm="eager_fp32"):
    return WorkloadSpec(seq_len=seq_len, micro_batch=micro_batch, software=SoftwareSpec(norm=norm))


def block_of(traced):
    return next(unit for unit in traced.units if unit.is_block)


def predictions(traced, spec: ModelSpec, seq_len, strategy="zero3"):
    return [
        predict(
            Job(
                model=model,
                cluster=make_cluster("a100-80", 8),
                workload=workload(seq_len, micro_batch=4, norm="fused"),
                layout=LayoutSpec(strategy=strategy, shard=8),
            )
        )
        for model in (traced, spec)
    ]


# --- decoders agree with their sizes -------------------------------------------------------------


@pytest.fixture(scope="module")
def one_b():
    return trace_model(on_meta(lambda: Decoder(ONE_B)), tokens(1, 2048))


@pytest.mark.parametrize(
    ("config", "tied"),
    [(TINY, False), (TINY, True), (ONE_B, True)],
    ids=["tiny", "tied", "1b-tied"],
)
def test_the_application_s_decoder_is_traced_as_its_sizes_say(config, tied):
    config = DecoderConfig(**{**vars(config), "tie_embeddings": tied})
    seq_len = config.max_seq_len
    traced = trace_model(on_meta(lambda: Decoder(config)), tokens(2, seq_len))
    spec = decoder_shape(config)
    assert traced.num_parameters == spec.num_parameters
    assert traced.flops_per_token(seq_len) == pytest.approx(spec.flops_per_token(seq_len), rel=0.01)
    assert traced.has_root_head == tied
    # The rotation leaves queries contiguous by head, so that attention's output is copied into rows
    # and kept twice, which sizes don't know (+5 %). Keys and values of fewer heads are read as they
    # are, where sizes count them repeated (-4 % in the tiny one).
    kept = block_kept(spec, workload(seq_len, norm="fused"))
    assert block_of(traced).trace.saved_bytes == pytest.approx(kept, rel=0.08)


@pytest.mark.parametrize("size", ["tiny", "1b"])
def test_a_transformers_llama_is_traced_as_its_configuration_says(size):
    transformers = pytest.importorskip("transformers")
    settings = {
        "tiny": {
            "vocab_size": 256,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 176,
        },
        "1b": {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 8192,
            "tie_word_embeddings": True,
        },
    }[size]
    config = transformers.LlamaConfig(max_position_embeddings=1024, **settings)
    seq_len = 1024
    model = on_meta(lambda: transformers.LlamaForCausalLM(config))
    ids = torch.zeros(2, seq_len, dtype=torch.long)
    traced = trace_model(model, lambda: ((), {"input_ids": ids, "use_cache": False}))
    spec = from_config(config.to_dict())
    assert traced.num_parameters == spec.num_parameters
    assert traced.flops_per_token(seq_len) == pytest.approx(spec.flops_per_token(seq_len), rel=0.01)
    # Sizes count keys and values repeated to as many heads as queries have; the kernel reads them
    # unrepeated.
    kept = block_kept(spec, workload(seq_len))
    assert block_of(traced).trace.saved_bytes == pytest.approx(kept, rel=0.08)
    assert traced.assumptions[0].startswith("1 conditions on values")


def test_units_are_laid_out_as_those_of_the_sizes(one_b):
    layout = LayoutSpec(strategy="hybrid", replicate=2, shard=4)
    ours = find_units(one_b, layout, "bf16", layers=16)
    theirs = find_units(decoder_shape(ONE_B), layout, "bf16", layers=16)
    assert [u.numel for u in ours] == [u.numel for u in theirs]
    assert [u.name for u in ours][:3] == ["(root)", "embed_tokens", "layers.0"]
    assert [u.kind for u in ours] == [u.kind for u in theirs]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_memory_and_bytes_agree_with_the_sizes_and_time_nearly(one_b, strategy):
    ours, theirs = predictions(one_b, decoder_shape(ONE_B), 2048, strategy)
    assert ours.sent_bytes == theirs.sent_bytes
    state = ("parameter_shards", "parameter_slots", "optimizer_state", "gradient_shards")
    for name in state:
        assert ours.memory.categories.get(name) == theirs.memory.categories.get(name)
    assert ours.memory.peak_bytes == pytest.approx(theirs.memory.peak_bytes, rel=0.1)
    # Elementwise operations are those of the meta device, one kernel each.
    assert ours.step_s == pytest.approx(theirs.step_s, rel=0.2)
    assert ours.mfu == pytest.approx(theirs.mfu, rel=0.2)


def test_micro_batches_scale_what_one_sample_said():
    small = trace_model(on_meta(lambda: Decoder(TINY)), tokens(1))
    large = trace_model(on_meta(lambda: Decoder(TINY)), tokens(4))
    assert 4 * block_of(small).trace.saved_bytes == pytest.approx(
        block_of(large).trace.saved_bytes,
        rel=0.02,  # the table of rotations is there once
    )
    one, other = (predictions(traced, decoder_shape(TINY), 128)[0] for traced in (small, large))
    assert one.step_s == pytest.approx(other.step_s, rel=0.02)
    assert one.memory.peak_bytes == pytest.approx(other.memory.peak_bytes, rel=0.02)


def test_frozen_parameters_cost_forward_only_and_hold_no_state():
    def frozen():
        model = Decoder(TINY)
        model.layers.requires_grad_(False)
        return model

    model = on_meta(frozen)
    whole, part = (trace_model(m, tokens()) for m in (on_meta(lambda: Decoder(TINY)), model))
    assert part.num_parameters == whole.num_parameters
    # Input gradients still flow through the blocks to the embedding.
    assert block_of(part).trace.backward_product_flops == pytest.approx(
        block_of(whole).trace.backward_product_flops / 2
    )
    held = [predictions(traced, decoder_shape(TINY), 128)[0].memory for traced in (whole, part)]
    assert held[1].categories["gradient_buffers"] < held[0].categories["gradient_buffers"]
    assert held[1].categories["optimizer_state"] < held[0].categories["optimizer_state"]


# --- other modules -------------------------------------------------------------------------------


def mlp():
    return nn.Sequential(
        nn.Linear(256, 1024),
        *(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6)),
        nn.Linear(1024, 10),
    )


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        *(
            nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
            for _ in range(4)
        ),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


@pytest.mark.parametrize(
    ("make", "shape", "flops"),
    [
        # Inputs need no gradient, so that the first product runs twice, not three times.
        (mlp, (256,), 2 * (2 * 256 * 1024 + 3 * (6 * 1024 * 1024 + 1024 * 10))),
        (conv_net, (3, 32, 32), 2 * (1024 * 9 * (2 * 3 * 64 + 3 * 4 * 64 * 64) + 3 * 64 * 10)),
    ],
    ids=["mlp", "conv"],
)
def test_models_that_are_no_decoders_plan_without_a_preset(make, shape, flops):
    model = on_meta(make)
    plans = sw.plan(
        model=model,
        sample=((torch.empty(8, *shape, device="meta"),), {}),
        cluster="8 x a100-80",
        workload={"global_batch": 512},
    )
    best = plans.best
    assert best.job.model.num_parameters == sum(p.numel() for p in model.parameters())
    assert best.job.model.flops_per_sample == flops
    assert best.job.workload.seq_len == 1
    assert 0 < best.step_s < 1
    assert "Sequential" in plans.table()
    assert plans.to_dict()["best"]["model"]["traced"] is True


def test_an_encoder_of_torch_s_own_is_planned_with_full_attention():
    layer = on_meta(lambda: nn.TransformerEncoderLayer(128, 4, 256, batch_first=True))
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    traced = trace_model(model, ((torch.empty(2, 64, 128, device="meta"),), {}))
    calls = [call for unit in traced.units for call in unit.trace.attentions]
    assert sum(call.count for call in calls) == 3
    assert not any(call.is_causal for call in calls)


def test_the_module_stays_as_it_was():
    model = Decoder(TINY)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    trace_model(model, tokens())
    assert not model.training
    assert all(p.grad is None and not p.is_meta for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_sample_that_returns_its_loss_needs_no_assumption():
    ids = torch.zeros(2, 128, dtype=torch.long)
    traced = trace_model(on_meta(lambda: Decoder(TINY)), ((ids, ids), {}))
    assert traced.output_numel == 0
    assert traced.assumptions == ()


class WithLoss(nn.Module):
    """Returns its loss and, as transformers' models do, the logits beside it."""

    def __init__(self, returns_logits):
        super().__init__()
        self.decoder = Decoder(TINY)
        self.returns_logits = returns_logits

    def forward(self, ids):
        logits = self.decoder(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        return {"loss": loss, "logits": logits} if self.returns_logits else loss


def test_a_loss_is_charged_once_whatever_comes_beside_it():
    alone, beside = (trace_model(on_meta(lambda r=r: WithLoss(r)), tokens()) for r in (False, True))
    assert beside.output_numel == 0
    assert beside.assumptions == ()
    assert beside.has_root_head
    assert [unit.trace for unit in beside.units] == [unit.trace for unit in alone.units]
    one, other = (predictions(traced, decoder_shape(TINY), 128)[0] for traced in (alone, beside))
    assert other.step_s == one.step_s
    assert other.memory.categories == one.memory.categories
    assert "logits_and_loss" not in other.memory.categories


def test_a_transformers_model_called_with_labels_is_charged_its_loss_once():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
    )
    model = on_meta(lambda: transformers.LlamaForCausalLM(config))
    ids = torch.zeros(2, 128, dtype=torch.long)
    given = {"input_ids": ids, "use_cache": False}
    bare = trace_model(model, lambda: ((), given))
    labelled = trace_model(model, lambda: ((), {**given, "labels": ids}))
    assert bare.output_numel == 2 * 128 * 512
    assert labelled.output_numel == 0


# --- what can't be traced ------------------------------------------------------------------------


class DependsOnValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * x.sum().item()


@pytest.mark.parametrize(
    ("make", "sample", "message"),
    [
        (DependsOnValues, lambda: ((torch.zeros(2, 4),), {}), r"can't be traced.*Pass sample="),
        (lambda: nn.Linear(4, 4), lambda: ((torch.zeros(2, 5),), {}), "can't be traced"),
        (lambda: nn.Linear(4, 4), torch.zeros(2, 4), r"sample must be \(args, kwargs\)"),
        (lambda: nn.Linear(4, 4), ((), {}), "forward|first tensor"),
        (nn.ReLU, lambda: ((torch.zeros(2, 4),), {}), "no parameters"),
    ],
)
def test_what_can_t_be_traced_says_what_to_pass(make, sample, message):
    with pytest.raises(SpecError, match=message):
        trace_model(on_meta(make), sample)


def test_a_module_without_a_sample_says_to_give_one():
    with pytest.raises(SpecError, match="pass sample="):
        sw.plan(model=nn.Linear(4, 4), cluster="8 x h100", workload={"global_batch": 8})


def test_a_traced_model_is_divided_over_data_axes_only():
    traced = trace_model(on_meta(lambda: Decoder(TINY)), tokens())
    with pytest.raises(SpecError, match="plan data axes only"):
        Job(
            model=traced,
            cluster=make_cluster("a100-80", 8),
            workload=workload(128),
            layout=LayoutSpec(strategy="zero3", shard=4, tensor=2),
        )
    with pytest.raises(SpecError, match="traced with 128 tokens per sample"):
        Job(
            model=traced,
            cluster=make_cluster("a100-80", 8),
            workload=workload(64),
            layout=LayoutSpec(strategy="zero3", shard=8),
        )


def test_a_sample_without_a_module_and_a_module_without_anything_to_train_are_refused():
    frozen = on_meta(lambda: nn.Linear(4, 4)).requires_grad_(requires_grad=False)
    given = {
        "sample": ((torch.empty(2, 4, device="meta"),), {}),
        "cluster": "8 x h100",
        "workload": {"global_batch": 16},
    }
    with pytest.raises(SpecError, match="a module that is traced, found model='gpt2'; leave"):
        sw.plan(model="gpt2", **given)
    with pytest.raises(SpecError, match="nothing to train: every parameter of Linear is frozen"):
        sw.plan(model=frozen, **given)
