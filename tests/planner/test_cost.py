"""Formulas against published ones and against their own limits."""

from __future__ import annotations

import pytest

from shardwright.planner.cluster import make_cluster
from shardwright.planner.cost.activation import block_kept
from shardwright.planner.cost.attention import AttentionShape, attention_s
from shardwright.planner.cost.collective import (
    all_gather_s,
    all_reduce_s,
    make_group,
    taken_s,
)
from shardwright.planner.cost.efficiency import GENERIC
from shardwright.planner.cost.matmul import matmul_s
from shardwright.planner.cost.optimizer import optimizer_s
from shardwright.planner.cost.state import paper_state_bytes
from shardwright.planner.device import find_device
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.memory import micro_batches_in_flight
from shardwright.planner.model import ModelSpec
from shardwright.planner.workload import (
    OptimizerSpec,
    PrecisionSpec,
    SoftwareSpec,
    WorkloadSpec,
)

A100 = find_device("a100-80")
GIB = 2**30


def megatron(**changes) -> WorkloadSpec:
    software = SoftwareSpec(
        class_name="fused",
        norm="fused",
        attention="fused_softmax",
        dropout=True,
        engine="megatron",
        **changes.pop("software", {}),
    )
    return WorkloadSpec(**{"seq_len": 2048, "micro_batch": 4, "software": software, **changes})


def gpt(layers: int, hidden: int, heads: int) -> ModelSpec:
    return ModelSpec(
        name="gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn_hidden=4 * hidden,
        vocab=51_200,
        gated=False,
        activation="gelu",
        norm="layer",
        tied=True,
    )


GPT_22B = gpt(48, 6144, 64)
GPT_1T = gpt(128, 25_600, 160)


# --- activations: arXiv 2205.05198 -------------------------------------------------------------


@pytest.mark.parametrize("model", [GPT_22B, GPT_1T])
def test_a_block_keeps_34_sbh_and_5_as_per_token(model):
    scores = 5 * model.heads * 2048 / model.hidden
    kept = block_kept(model, megatron()) / (4 * 2048 * model.hidden)
    assert kept == pytest.approx(34 + scores, rel=1e-12)


def test_the_tensor_axis_leaves_ten_bytes_whole():
    kept = block_kept(GPT_22B, megatron(), tensor=8) / (4 * 2048 * 6144)
    assert kept == pytest.approx(10 + 24 / 8 + 5 * 64 * 2048 / (6144 * 8))


def test_22b_keeps_59_25_gib_without_and_9_56_with_sequence_parallel_selective_recomputation():
    plain = 48 * block_kept(GPT_22B, megatron(), tensor=8) / GIB
    divided = megatron(checkpointing="attention_core", software={"sequence_parallel": True})
    assert plain == pytest.approx(59.25)
    assert 48 * block_kept(GPT_22B, divided, tensor=8) / GIB == pytest.approx(9.5625)


def test_full_recomputation_keeps_a_block_s_input():
    full = megatron(checkpointing="full")
    assert block_kept(GPT_22B, full) == 2 * 4 * 2048 * 6144


@pytest.mark.parametrize(
    ("kind", "software", "percent"),
    [
        ("none", {}, 100),
        ("none", {"sequence_parallel": True}, 66.84),
        ("attention_core", {}, 49.42),
        ("attention_core", {"sequence_parallel": True}, 16.18),
        ("full", {}, 7.64),
    ],
)
def test_the_paper_s_shares_of_activation_memory_for_22b(kind, software, percent):
    """The printed shares include the model's ends, which is what the tolerance is for."""
    baseline = block_kept(GPT_22B, megatron(), tensor=8)
    workload = megatron(checkpointing=kind, software=software)
    share = 100 * block_kept(GPT_22B, workload, tensor=8) / baseline
    assert share == pytest.approx(percent, abs=0.08)


def test_a_pipeline_s_first_stage_holds_as_many_micro_batches_as_stages():
    workload = megatron(accumulation=64)
    flat = LayoutSpec(strategy="zero1", shard=1, pipeline=8)
    assert micro_batches_in_flight(flat, workload) == 8
    interleaved = LayoutSpec(strategy="zero1", shard=1, pipeline=8, chunks_per_stage=3)
    assert micro_batches_in_flight(interleaved, workload) == pytest.approx(8 * (1 + 7 / 24))
    assert micro_batches_in_flight(flat, megatron(accumulation=2)) == 2


# --- states: arXiv 1910.02054, table 1 -----------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "figures"),
    [
        (1, (120, 120, 120)),
        (4, (52.5, 41.3, 30)),
        (16, (35.6, 21.6, 7.5)),
        (64, (31.4, 16.6, 1.88)),
        (256, (30.4, 15.4, 0.47)),
        (1024, (30.1, 15.1, 0.12)),
    ],
)
def test_7_5b_states_are_those_of_the_zero_paper(ranks, figures):
    for stage, printed in zip((1, 2, 3), figures, strict=True):
        size = paper_state_bytes(7.5e9, stage=stage, ranks=ranks) / 1e9
        assert size == pytest.approx(printed, abs=0.06), (stage, ranks)


# --- products ----------------------------------------------------------------------------------


def test_a_large_product_reaches_nearly_its_sustained_speed():
    seconds = matmul_s(16_384, 8192, 8192, A100)
    reached = 2 * 16_384 * 8192 * 8192 / seconds / A100.peak_flops("bf16")
    assert 0.9 * A100.sustained_share < reached < A100.sustained_share


def test_a_thin_product_is_bound_by_memory():
    seconds = matmul_s(1, 8192, 8192, A100)
    assert seconds >= 2 * 8192 * 8192 / (A100.memory_gbps * 1e9)


def test_a_wave_that_is_nearly_empty_costs_a_whole_one():
    full = matmul_s(108 * 128, 4096, 256, A100)
    over = matmul_s(109 * 128, 4096, 256, A100)
    assert over > 1.2 * full


def test_misaligned_rows_are_slow():
    assert matmul_s(4096, 4096, 108 * 4 + 4, A100) > 2 * matmul_s(4096, 4096, 108 * 4, A100)


@pytest.mark.parametrize("kernel", ["eager", "fused_softmax", "flash1", "flash2"])
def test_attention_grows_with_the_square_of_the_sequence(kernel):
    def seconds(seq_len):
        shape = AttentionShape(batch=1, seq_len=seq_len, heads=32, head_width=128)
        return sum(attention_s(shape, kernel, A100, GENERIC))

    assert 3.5 < seconds(32_768) / seconds(16_384) < 4.3


@pytest.mark.parametrize("kernel", ["flash1", "flash2"])
def test_kernels_of_ampere_s_instructions_gain_only_clock_and_processors_on_blackwell(kernel):
    shape = AttentionShape(batch=4, seq_len=8192, heads=32, head_width=128)
    hopper, blackwell = find_device("h100"), find_device("b200")
    gain = attention_s(shape, kernel, hopper, GENERIC)[0]
    gain /= attention_s(shape, kernel, blackwell, GENERIC)[0]
    assert gain == pytest.approx(blackwell.bf16_tflops / hopper.bf16_tflops / 2, rel=0.01)


@pytest.mark.parametrize("kernel", ["eager", "flash1"])
def test_attention_in_fp32_does_not_run_on_tensor_cores(kernel):
    shape = AttentionShape(batch=4, seq_len=8192, heads=32, head_width=128)
    narrow = attention_s(shape, kernel, A100, GENERIC)
    wide = attention_s(shape, kernel, A100, GENERIC, dtype="fp32")
    assert sum(wide) > 2 * sum(narrow)


def test_a_causal_mask_as_a_bias_computes_what_is_masked_too():
    shape = AttentionShape(batch=1, seq_len=16_384, heads=32, head_width=128)
    skipping = sum(attention_s(shape, "flash1", A100, GENERIC))
    biased = sum(attention_s(shape, "flash1_biased", A100, GENERIC))
    assert biased == pytest.approx(2 * skipping, rel=0.03)


# --- collectives -------------------------------------------------------------------------------


def test_a_gather_over_a_node_takes_n_minus_1_over_n_of_the_bytes():
    group = make_group(make_cluster("a100-80", 8), size=8, stride=1)
    seconds = all_gather_s(8e9, group)
    assert seconds == pytest.approx(7e9 / (300e9 * 0.8), rel=0.01)


def test_an_all_reduce_costs_two_gathers_where_bytes_decide():
    group = make_group(make_cluster("a100-80", 8), size=8, stride=1)
    assert all_reduce_s(8e9, group) == pytest.approx(2 * all_gather_s(8e9, group), rel=0.02)


def test_all_ranks_of_a_node_share_its_cards():
    cluster = make_cluster("h100", 64, network="8x400g-ib")
    replicas = make_group(cluster, size=8, stride=8)
    everyone = make_group(cluster, size=64, stride=1)
    assert replicas.gbps == pytest.approx(everyone.gbps / 8)


def test_140_gb_all_reduced_by_32_nodes_at_25_gb_s_takes_10_85_s():
    cluster = make_cluster("h800", 256, network="2x100g-roce")
    node_s = 2 * 140e9 * 31 / 32 / (cluster.node_gbps * 1e9)
    assert node_s == pytest.approx(10.85, abs=0.005)
    shard = make_group(cluster, size=32, stride=8)
    efficiency = cluster.outer.efficiency
    assert all_reduce_s(140e9 / 8, shard) == pytest.approx(node_s / efficiency, rel=0.01)


def test_small_messages_pay_latency():
    group = make_group(make_cluster("h100", 1024), size=1024, stride=1)
    assert all_gather_s(1024, group) > 1023 * 2e-6


def test_a_group_of_one_costs_nothing():
    group = make_group(make_cluster("h100", 8), size=1, stride=1)
    assert all_gather_s(1e9, group) == all_reduce_s(1e9, group) == 0


def test_what_collectives_take_grows_with_bytes_and_time_and_never_beyond_it():
    hidden_s = 0.1
    taken = [taken_s(hidden_s, moved, A100) for moved in (0.0, 1e9, 10e9, 1e12)]
    assert taken == sorted(taken)
    assert taken[0] == pytest.approx(hidden_s * 8 / A100.num_sms)
    assert taken[1] - taken[0] == pytest.approx(3e9 / (A100.memory_gbps * 1e9))
    assert taken[-1] == hidden_s
    assert taken_s(2 * hidden_s, 1e9, A100) > taken[1]  # a slower link


# --- optimizer ---------------------------------------------------------------------------------


def test_a_fused_adam_moves_30_bytes_per_element_and_its_norm_12_more():
    workload = WorkloadSpec(
        seq_len=1,
        micro_batch=1,
        precision=PrecisionSpec(),
        optimizer=OptimizerSpec(implementation="fused"),
    )
    seconds = optimizer_s(1e9, workload, A100, GENERIC)
    assert seconds * A100.memory_gbps * 0.74 == pytest.approx(30 + 12)


def test_a_chain_of_list_operations_moves_more_than_a_fused_kernel():
    def seconds(implementation):
        optimizer = OptimizerSpec(implementation=implementation)
        workload = WorkloadSpec(seq_len=1, micro_batch=1, optimizer=optimizer)
        return optimizer_s(1e9, workload, A100, GENERIC)

    assert seconds("foreach") > 2 * seconds("fused")
