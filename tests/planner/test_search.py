"""The search compares what fits, recommends the fastest and says why."""

from __future__ import annotations

import json
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.app.presets import PRESETS
from shardwright.core.errors import SpecError
from shardwright.planner.advice import changes_of, reasons_for
from shardwright.planner.cluster import make_cluster
from shardwright.planner.cost.compression import narrow_gather_s
from shardwright.planner.explain import explain
from shardwright.planner.model_presets import find_model
from shardwright.planner.predict import predict
from shardwright.planner.probe import factors_from_probe
from shardwright.planner.recommend import TOLERANCE, step_s, ties
from shardwright.planner.search import SearchSpace, search, winners_with
from shardwright.planner.workload import CompressionSpec, OptimizerSpec, WorkloadSpec
from tests.planner.jobs import job

DATA_ONLY = SearchSpace(max_tensor=1, max_pipeline=1)


def find(model="llama-3-8b", devices=16, batch=128, *, network="8x200g-ib", space=DATA_ONLY):
    return search(
        find_model(model),
        make_cluster("a100-80", devices, network=network),
        WorkloadSpec(seq_len=4096, micro_batch=1),
        batch,
        space,
    )


@pytest.fixture(scope="module")
def result():
    return find()


def test_candidates_fit_and_come_fastest_first(result):
    times = [candidate.prediction.step_s for candidate in result.candidates]
    assert times == sorted(times)
    limit = 0.95 * make_cluster("a100-80", 8).device.memory_gib
    assert all(c.memory.needed_gib <= limit for c in result.candidates)


def test_the_recommendation_is_as_fast_as_the_fastest_within_the_tolerance(result):
    assert step_s(result.best) <= (1 + TOLERANCE) * step_s(result.candidates[0])


def test_of_layouts_as_fast_the_simplest_is_recommended_and_said_so():
    found = find("gpt2", 8, 512)
    assert found.best.strategy == "ddp"
    equal = {candidate.strategy for candidate in ties(found.candidates)}
    assert {"ddp", "zero1", "zero3"} <= equal
    text = " / ".join(reasons_for(found))
    assert "settings as fast within 2% it is the simplest" in text


def test_of_equal_strategies_least_is_recomputed():
    found = find("llama-3.2-1b", 8, 64)
    equal = [c for c in ties(found.candidates) if c.strategy == found.best.strategy]
    order = ("none", "selective", "full")
    ranks = [order.index(c.job.workload.checkpointing) for c in equal]
    assert order.index(found.best.job.workload.checkpointing) == min(ranks)


def test_what_the_engine_runs_is_recommended_and_what_it_doesn_t_is_an_alternative():
    found = find("llama-3-70b", 64, 64, space=SearchSpace())
    fastest = found.candidates[0]
    assert "tensor parallelism" in fastest.missing
    assert found.best.missing == ()
    assert not found.why_not_today
    gain = 1 - step_s(fastest) / step_s(found.best)
    (said,) = (r for r in reasons_for(found) if "which the engine doesn't run yet" in r)
    assert f"{fastest.job.layout.describe()} with" in said
    assert f"would take {gain:.0%} less time" in said


def test_where_nothing_fits_that_the_engine_runs_the_rest_is_recommended():
    space = SearchSpace(strategies=("ddp",), checkpointing=("full",), max_pipeline=1)
    found = find(space=space)
    assert found.best.missing == ("tensor parallelism",)
    assert any("nothing without them fits" in reason for reason in reasons_for(found))


def test_settings_that_can_t_run_yet_leave_the_choice_of_axes_alone():
    offloaded = OptimizerSpec(is_offloaded=True)
    found = search(
        find_model("llama-3-8b"),
        make_cluster("a100-80", 16, network="8x200g-ib"),
        WorkloadSpec(seq_len=4096, micro_batch=1, optimizer=offloaded),
        128,
    )
    assert found.best.missing == ("offloading of the optimizer",)
    text = " / ".join(reasons_for(found))
    assert "an option asked for that: plan without it" in text


def test_nothing_on_the_front_is_beaten_in_both_time_and_memory(result):
    for one in result.front:
        assert not any(
            other.prediction.step_s < one.prediction.step_s
            and other.memory.peak_bytes < one.memory.peak_bytes
            for other in result.candidates
        )


def test_strategies_that_never_fit_are_listed_with_their_smallest_need(result):
    names = {candidate.strategy for candidate in result.unfit}
    assert "ddp" in names
    fitting = {candidate.strategy for candidate in result.candidates}
    assert not names & fitting


def test_every_candidate_processes_the_global_batch(result):
    for candidate in result.candidates:
        workload, layout = candidate.job.workload, candidate.job.layout
        batch = workload.micro_batch * workload.accumulation * layout.num_data_ranks
        assert batch == 128


def test_layouts_beyond_the_engine_are_marked():
    found = find(devices=64, space=SearchSpace())
    tensor = [c for c in found.candidates if c.job.layout.tensor > 1]
    assert tensor
    assert all("tensor parallelism" in c.missing for c in tensor)


def test_reasons_name_what_limits_and_where_others_lose(result):
    text = " / ".join(reasons_for(result))
    assert "tokens/s per device" in text
    assert "slower" in text


def test_a_faster_network_is_judged(result):
    text = " / ".join(changes_of(result))
    assert "with twice the bandwidth between nodes" in text
    assert "with half the bandwidth between nodes" in text


@pytest.mark.parametrize(
    ("model", "devices", "batch", "space"),
    [("gpt2", 16, 512, DATA_ONLY), ("llama-3-8b", 16, 128, SearchSpace())],
)
def test_other_networks_are_judged_by_the_rule_that_recommends(model, devices, batch, space):
    found = find(model, devices, batch, space=space)
    cluster = found.best.job.cluster
    slower = cluster.with_network(factor=0.5)
    winners = winners_with(found, {"the same": cluster, "slower": slower})
    assert winners["the same"].job == found.best.job
    again = search(find_model(model), slower, found.best.job.workload, batch, space)
    assert winners["slower"].job.layout == again.best.job.layout


def test_a_change_that_changes_nothing_is_said_to_leave_the_recommendation():
    said = changes_of(find("gpt2", 16, 512))
    assert all("it is still the one to take" in text for text in said if "bandwidth" in text)


def test_a_slow_network_makes_hybrid_win_where_it_fits():
    slow = find("gpt2-xl", 64, 512, network="100g-roce")
    assert slow.best.strategy != "zero3"
    zero3 = next(c for c in slow.candidates if c.strategy == "zero3")
    hybrid = next(c for c in slow.candidates if c.strategy.startswith("hybrid"))
    assert hybrid.prediction.step_s < zero3.prediction.step_s


def test_a_batch_that_divides_over_no_mesh_is_an_error():
    with pytest.raises(SpecError, match="a global batch of 7 sequences divides over no mesh"):
        find(batch=7)


@pytest.mark.parametrize("headroom", [-0.1, 1.0])
def test_headroom_is_a_share(headroom):
    with pytest.raises(SpecError, match="headroom"):
        SearchSpace(headroom=headroom)


def test_a_mesh_must_use_every_device_and_divide_the_heads():
    with pytest.raises(SpecError, match="must use every device"):
        job(devices=8, strategy="ddp", layout={"chunks_per_stage": 1}, replicate=3)
    with pytest.raises(SpecError, match="must divide the heads"):
        job(devices=8, tensor=8)


# --- explanations ------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", [1, 2])
def test_parts_of_an_explained_figure_add_up_to_it(pipeline):
    predicted = predict(job(devices=16, strategy="zero1", pipeline=pipeline, accumulation=4))
    for item in explain(predicted):
        assert sum(item.parts.values()) == pytest.approx(item.total), item.title
        for text in (item.why, item.picture, item.small_numbers, item.formula, item.sanity):
            assert text


# --- sw.plan -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plans():
    return sw.plan(
        model="llama-3.2-1b",
        cluster="8 x a100-80",
        workload={"seq_len": 2048, "global_batch": 64},
        space=DATA_ONLY,
    )


def test_plans_print_units_layouts_and_reasons(plans):
    table = plans.table()
    assert "Memory in GiB" in table
    assert "links in GB/s" in table
    assert f"Take {plans.best.job.layout.describe()}" in table


def test_plans_are_plain_data(plans):
    document = json.loads(plans.to_json())
    assert document["best"]["layout"]["strategy"] == plans.best.job.layout.strategy
    assert document["layouts"][0]["step_s"] <= document["layouts"][-1]["step_s"]
    assert len(plans.to_csv().splitlines()) == len(plans.rows()) + 1


def test_a_plan_file_holds_layout_units_traffic_and_memory(plans, tmp_path):
    plans.save(tmp_path / "plan.json")
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["version"] == 1
    assert found["predicted"]["sent_bytes"] == dict(plans.best.sent_bytes)
    assert sum(found["predicted"]["memory_bytes"].values()) == plans.best.memory.peak_bytes
    assert found["engine"]["units"][0]["name"] == "(root)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": "eight h100s"}, "cluster must read like"),
        ({"cluster": "0 x h100"}, "num_devices must be greater than 0"),
        ({"model": 7}, "found int"),
        ({"workload": {"seq_len": 2048}}, "either 'global_batch' or"),
        ({"workload": {"seqlen": 2048}}, "did you mean 'seq_len'"),
        ({"workload": {"seq_len": 0, "global_batch": 8}}, "seq_len must be greater than 0"),
        ({"workload": {"seq_len": 2048, "global_batch_tokens": 5000}}, "use 4096"),
    ],
)
def test_requests_that_make_no_sense_say_what_to_change(changes, message):
    request = {
        "model": "gpt2",
        "cluster": "8 x h100",
        "workload": {"seq_len": 1024, "global_batch": 8},
        **changes,
    }
    with pytest.raises(SpecError, match=message):
        sw.plan(**request)


@pytest.mark.parametrize("name", ["tiny", "llama-3.2-1b", "llama-3-8b"])
def test_the_training_application_s_decoder_is_planned_with_its_own_count(name):
    config = PRESETS[name]
    found = sw.plan(
        model=config,
        cluster="8 x h100",
        workload={"seq_len": 256, "global_batch": 64},
        space=DATA_ONLY,
    )
    assert found.best.job.model.num_parameters == config.num_parameters


# --- probe -------------------------------------------------------------------------------------


def test_a_probed_job_is_predicted_exactly():
    made = job("llama-2-7b", seq_len=2048, micro_batch=4)
    measured = 1.37 * predict(made).step_s
    factors = factors_from_probe(made, measured)
    assert predict(made, efficiencies=factors).step_s == pytest.approx(measured, rel=1e-6)


def test_a_probe_beyond_the_peak_is_refused_with_what_it_implies():
    made = job("llama-2-7b", seq_len=2048, micro_batch=4)
    fastest_s = predict(made).step_s * predict(made).mfu  # at an MFU of 100 %
    with pytest.raises(SpecError, match=r"implies an MFU of 101% .* more than there is. Check its"):
        factors_from_probe(made, fastest_s / 1.01)


def test_a_probe_that_computes_twice_beyond_the_peak_is_refused():
    made = job("llama-2-7b", seq_len=2048, micro_batch=4, checkpointing="full")
    mfu = predict(made).mfu
    with pytest.raises(SpecError, match="implies an MFU of 80% and computes at 107% of the peak"):
        factors_from_probe(made, predict(made).step_s * mfu / 0.8)


def test_a_probe_nearer_the_peak_than_runs_get_is_warned_of():
    made = job("llama-2-7b", seq_len=2048, micro_batch=4)
    fastest_s = predict(made).step_s * predict(made).mfu
    doubtful = factors_from_probe(made, fastest_s / 0.8)
    usual = factors_from_probe(made, fastest_s / 0.5)
    assert "implies an MFU of 80%" in predict(made, efficiencies=doubtful).warnings[0]
    assert not any("implies" in text for text in predict(made, efficiencies=usual).warnings)


def test_a_probe_that_computation_can_t_explain_is_refused():
    made = job("llama-2-7b", seq_len=2048, micro_batch=4)
    with pytest.raises(SpecError, match="can't be explained by the speed of computation"):
        factors_from_probe(made, 1e4)


def test_the_documented_probe_is_plausible():
    text = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^(\{.step_s.*\})$", text, flags=re.MULTILINE)
    probe = json.loads(found)
    made = job(
        "llama-3-8b",
        devices=probe["devices"],
        strategy=probe["strategy"],
        seq_len=4096,
        micro_batch=probe["micro_batch"],
        checkpointing=probe["checkpointing"],
    )
    predicted = predict(made)
    assert probe["step_s"] == pytest.approx(predicted.step_s, rel=0.1)
    mfu = predicted.mfu * predicted.step_s / probe["step_s"]
    assert f"those {probe['step_s']} s are an MFU of {100 * mfu:.0f} %" in text


def test_a_probe_file_scales_the_plan(tmp_path):
    probe = tmp_path / "measured.json"
    request = {
        "model": "llama-3.2-1b",
        "cluster": "8 x a100-80",
        "workload": {"seq_len": 2048, "global_batch": 64},
        "space": DATA_ONLY,
    }
    before = sw.plan(**request).best
    document = {
        "step_s": 2 * before.step_s,
        "strategy": before.job.layout.strategy,
        "micro_batch": before.job.workload.micro_batch,
        "accumulation": before.job.workload.accumulation,
        "checkpointing": before.job.workload.checkpointing,
    }
    probe.write_text(json.dumps(document))
    after = sw.plan(**request, probe=probe).best
    assert after.step_s == pytest.approx(2 * before.step_s, rel=0.05)
    probe.write_text(json.dumps({**document, "speed": 1}))
    with pytest.raises(SpecError, match="unknown key 'speed'"):
        sw.plan(**request, probe=probe)


def test_searching_a_large_cluster_takes_little_memory():
    """What is remembered between layouts must not grow with the number of devices or layers."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = find("llama-3.1-405b", 16_384, 16_384, network="8x400g-ib", space=SearchSpace())
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert found.num_considered > 1000
    assert grown_kib < 200 * 1024


# --- settings of the engine, and interleaving ----------------------------------------------------


def settled(**settings):
    return sw.plan(
        model="llama-3-8b",
        cluster="16 x a100-80 over 100g-roce",
        workload={"seq_len": 2048, "global_batch": 16, "micro_batch": 1, "checkpointing": "full"},
        settings=settings,
        space=SearchSpace(strategies=("zero3",), max_tensor=1, max_pipeline=1),
    )


def plain(plans):
    """The prediction without the residency that the search tries on its own."""
    jobs = [c for c in plans.result.candidates if c.job.layout.resident_units == 0]
    return jobs[0].prediction


def test_settings_change_slots_and_waits():
    usual = plain(settled())
    held = usual.memory.categories["parameter_slots"]
    for settings, compare in (
        ({"forward_prefetch": 0, "backward_prefetch": 0}, "less"),
        ({"forward_prefetch": 2, "backward_prefetch": 2}, "more"),
        ({"forward_prefetch": 2, "backward_prefetch": 2, "max_in_flight": 1}, "same"),
    ):
        other = plain(settled(**settings))
        slots = other.memory.categories["parameter_slots"]
        assert {"less": slots < held, "more": slots > held, "same": slots == held}[compare]
    unhidden = plain(settled(forward_prefetch=0, backward_prefetch_at="post"))
    assert unhidden.memory.categories["parameter_slots"] < held
    assert unhidden.step_s > usual.step_s
    assert unhidden.exposed_share > usual.exposed_share


def test_residency_saves_gathers_for_memory():
    usual, kept = plain(settled()), settled(residency=8).best
    assert kept.job.layout.resident_units == 8
    gather = "all_gather over shard"
    assert kept.sent_bytes[gather] < usual.sent_bytes[gather]
    assert kept.memory.peak_bytes > usual.memory.peak_bytes


def test_residency_is_planned_only_where_units_are_dropped():
    base = replace(SearchSpace().base, resident_units=4)
    found = find("gpt2-xl", 16, 512, space=replace(DATA_ONLY, base=base))
    for candidate in found.candidates:
        drops = candidate.strategy in ("zero3", "hybrid", "hybrid_full_optimizer")
        assert candidate.job.layout.resident_units == (4 if drops else 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefetch": 1}, "settings: unknown key 'prefetch'"),
        ({"max_in_flight": 0}, "max_in_flight must be greater than 0"),
        ({"backward_prefetch_at": "mid"}, "unknown backward_prefetch_at 'mid'"),
        ({"residency": "layers.3"}, "residency must be a number of blocks or names"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(SpecError, match=message):
        settled(**settings)


@pytest.mark.parametrize("key", ["context_parallel", "expert_parallel"])
def test_what_is_not_modelled_is_said_so(key):
    with pytest.raises(SpecError, match=f"not modelled; leave '{key}' out"):
        sw.plan(
            model="gpt2",
            cluster="8 x h100",
            workload={"seq_len": 128, "global_batch": 8, key: 2},
        )


def test_interleaved_stages_divide_the_bubble_by_their_chunks():
    """Narayanan et al., arXiv 2104.04473, section 2.2: (p - 1) / (v m) of the ideal time."""
    bubbles = []
    for chunks in (1, 2, 4):
        predicted = predict(
            job(
                "llama-3-8b",
                devices=16,
                strategy="zero1",
                pipeline=4,
                accumulation=8,
                layout={"chunks_per_stage": chunks},
            )
        )
        steady = predicted.bubble_s * chunks / 3
        bubbles.append(predicted.bubble_s)
        assert predicted.bubble_s == pytest.approx(3 / (chunks * 8) * 8 * steady)
    # Chunks send between stages more often, which each micro-batch pays for.
    assert bubbles[1] == pytest.approx(bubbles[0] / 2, rel=0.05)
    assert bubbles[2] == pytest.approx(bubbles[0] / 4, rel=0.1)


def test_stages_interleave_where_both_ends_count_as_a_block():
    """126 blocks and both ends over 16 stages: eight places each (Llama 3, arXiv 2407.21783)."""
    found = find("llama-3.1-405b", 16_384, 2048, network="8x400g-ib", space=SearchSpace())
    layouts = [candidate.job.layout for candidate in found.candidates]
    assert 8 in {layout.chunks_per_stage for layout in layouts if layout.pipeline == 16}


def test_interleaving_is_searched_where_asked_and_marked():
    space = SearchSpace(strategies=("zero1",), max_tensor=1, max_pipeline=4, max_chunks=4)
    found = find("llama-3-8b", 64, 512, space=space)
    chunked = [c for c in found.candidates if c.job.layout.chunks_per_stage > 1]
    assert {c.job.layout.chunks_per_stage for c in chunked} == {2, 4}
    assert all("interleaved stages" in c.missing for c in chunked)
    for candidate in chunked:
        layout, workload = candidate.job.layout, candidate.job.workload
        assert workload.accumulation % layout.pipeline == 0
        assert candidate.job.model.layers % (layout.pipeline * layout.chunks_per_stage) == 0


def compressed(compression, strategy="zero3"):
    return sw.plan(
        model="llama-3-8b",
        cluster="16 x a100-80 over 100g-roce",
        workload={
            "seq_len": 2048,
            "global_batch": 16,
            "micro_batch": 1,
            "checkpointing": "full",
            "compression": compression,
        },
        space=SearchSpace(strategies=(strategy,), max_tensor=1, max_pipeline=1),
    )


def test_compression_narrows_what_is_sent_and_shortens_what_is_waited_for():
    """ZeRO++ (arXiv 2306.10209): gathers in 8 bits send half, reductions in 4 a quarter of 16."""
    usual, narrow = plain(compressed({})), plain(compressed("gather=int8,reduce=int4"))
    for name, share in (
        ("all_gather over shard", (1 + 4 / 256) / 2),
        ("reduce_scatter over shard", (0.5 + 4 / 256) / 4),
    ):
        assert narrow.sent_bytes[name] == pytest.approx(share * usual.sent_bytes[name])
    assert sum(narrow.exposed_s.values()) < sum(usual.exposed_s.values())
    assert narrow.step_s < 0.7 * usual.step_s


def test_compression_costs_buffers_and_is_marked_as_not_there():
    usual, narrow = plain(compressed({})), plain(compressed({"gather": "int8"}))
    held = narrow.memory.categories["wire_buffers"]
    largest = max(unit.numel for unit in narrow.stage.units)
    assert held == (1 + 4 / 256) * largest
    assert "wire_buffers" not in usual.memory.categories
    assert narrow.job.missing == ("compressed collectives",)


def test_narrowing_takes_time_where_links_are_no_limit():
    alone = predict(job("llama-3-8b", devices=8, seq_len=4096))
    narrow = predict(
        job("llama-3-8b", devices=8, seq_len=4096, compression=CompressionSpec(gather="int8"))
    )
    seconds = narrow.stage.costs()["layers.0"].gather_s, alone.stage.costs()["layers.0"].gather_s
    unit = next(unit for unit in narrow.stage.units if unit.name == "layers.0")
    shape = (unit.numel, 2, 8, narrow.job.workload.compression, narrow.job.cluster.device)
    coded = narrow_gather_s(*shape, narrow.efficiency)
    assert coded > 0
    assert seconds[0] - (1 + 4 / 256) / 2 * seconds[1] > coded


@pytest.mark.parametrize("given", ["int8", "gather=int3", {"scatter": "int8"}, 8, ""])
def test_compression_that_makes_no_sense_is_refused(given):
    with pytest.raises(SpecError, match="compression"):
        compressed(given)
