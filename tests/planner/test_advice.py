"""What is said of layouts: where each loses, in what is true of it."""

from __future__ import annotations

import re

import pytest

import shardwright as sw
from shardwright.planner.advice import seconds
from shardwright.planner.search import SearchSpace


def advice(model, cluster, workload, **space):
    plans = sw.plan(model=model, cluster=cluster, workload=workload, space=SearchSpace(**space))
    return " / ".join((*plans.reasons, *plans.changes))


def test_replicated_states_lose_in_the_optimizer_step():
    workload = {"seq_len": 1024, "global_batch": 64}
    text = advice("gpt2", "8 x a100-80", workload, max_tensor=1)
    assert "s more in the optimizer step, where each rank updates more" in text


def test_what_must_recompute_more_is_said_to():
    workload = {"seq_len": 4096, "global_batch": 64}
    text = advice("llama-2-7b", "8 x a100-40", workload, max_tensor=1)
    assert re.search(r"zero2 shard=8 is \d+% slower: it fits only with full recomputation", text)


def test_what_is_missing_is_listed_as_one_says_it():
    workload = {"seq_len": 8192, "global_batch": 2048}
    text = advice("llama-3.1-405b", "16384 x h100 over 8x400g-ib", workload)
    assert "it needs tensor parallelism, pipeline stages and interleaved stages" in text


@pytest.mark.parametrize(
    ("value", "text"), [(0.06651, "0.067"), (9.6117, "9.612"), (82.394, "82.39")]
)
def test_times_have_the_digits_that_tell_them_apart(value, text):
    assert seconds(value) == text
