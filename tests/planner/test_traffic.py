"""Bytes over the tensor and pipeline axes are counted beside those over data axes."""

from __future__ import annotations

import pytest

from shardwright.planner.predict import predict
from shardwright.planner.workload import SoftwareSpec
from tests.planner.jobs import job

STREAM = 2 * 128 * 256 * 2
"""Micro-batch x tokens x width x bytes of the residual stream of the tests' tiny model."""


def sent(**changes):
    return predict(job(**changes)).sent_bytes


def test_data_axes_alone_send_nothing_over_others():
    assert set(sent()) == {"all_gather over shard", "reduce_scatter over shard"}


@pytest.mark.parametrize(("checkpointing", "num_sums"), [("none", 4), ("full", 6)])
def test_a_tensor_axis_sums_the_stream_twice_forward_and_twice_backward(checkpointing, num_sums):
    found = sent(tensor=4, accumulation=3, checkpointing=checkpointing)
    expected = 3 * 4 * num_sums * 2 * STREAM * 3 / 4  # micro-batches, blocks, sums, ring
    assert found["all_reduce over tensor"] == expected


def test_divided_sequences_are_gathered_and_reduce_scattered_for_the_same_bytes():
    whole = sent(tensor=2)
    divided = sent(tensor=2, software=SoftwareSpec(sequence_parallel=True))
    parts = [divided[f"{kind} over tensor"] for kind in ("all_gather", "reduce_scatter")]
    assert parts[0] == parts[1] == whole["all_reduce over tensor"] / 2


def test_stages_send_activations_on_and_gradients_back():
    last = sent(pipeline=4, accumulation=8)
    assert last["send over pipeline"] == 8 * STREAM  # the last stage only sends gradients
    parts = sent(pipeline=2, tensor=2, accumulation=8)
    assert parts["send over pipeline"] == 8 * STREAM / 2
    interleaved = sent(pipeline=2, accumulation=8, layout={"chunks_per_stage": 2})
    assert interleaved["send over pipeline"] == 8 * STREAM * 3
