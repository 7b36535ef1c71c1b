"""Learning rate and parameter groups."""

from __future__ import annotations

import pytest

from shardwright.app.config import TrainSection
from shardwright.app.models import Decoder
from shardwright.app.optimizer import build_optimizer, learning_rate, set_learning_rate
from shardwright.app.presets import DecoderConfig

SHAPE = DecoderConfig(
    vocab_size=7, hidden=8, layers=1, heads=2, kv_heads=2, ffn_hidden=8, max_seq_len=8
)


def rates(steps: int, warmup_steps: int) -> list[float]:
    return [
        learning_rate(step, steps=steps, warmup_steps=warmup_steps, peak=1.0, final=0.1)
        for step in range(steps)
    ]


def test_the_learning_rate_rises_to_the_peak_then_falls_to_the_end() -> None:
    values = rates(20, 4)
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    assert values[4] == 1.0
    assert values[4:] == sorted(values[4:], reverse=True)
    assert values[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 0), (1, 1), (2, 2), (3, 2)])
def test_short_runs_keep_the_learning_rate_in_bounds(steps: int, warmup_steps: int) -> None:
    assert all(0.1 <= value <= 1.0 for value in rates(steps, warmup_steps))


def test_matrices_decay_and_gains_do_not() -> None:
    model = Decoder(SHAPE)
    optimizer = build_optimizer(model, TrainSection(weight_decay=0.25))
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.25, 0.0)
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    assert {parameter.ndim for parameter in kept["params"]} == {1}
    count = len(decayed["params"]) + len(kept["params"])
    assert count == len(list(model.parameters()))


def test_setting_the_learning_rate_reaches_every_group() -> None:
    optimizer = build_optimizer(Decoder(SHAPE), TrainSection())
    set_learning_rate(optimizer, 0.5)
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
