"""Models and ways of training drawn at random equal one process.

Always the same draws; `python -m tests.support.drawn --examples 500 --seed 1` runs others.
"""

from __future__ import annotations

import math

import pytest

from tests.support.drawing import draw_specs, explain, find_failures, shrink
from tests.support.drawn import PartSpec, Spec, brief, simpler
from tests.support.pool import RankPool

SEED = 20
EXAMPLES = {1: 15, 2: 30, 3: 25, 4: 40}
EXAMPLES_WITH_CASTS = {1: 6, 2: 14, 3: 10, 4: 12}


@pytest.mark.parametrize("world", EXAMPLES)
def test_drawn_models_and_ways_of_training_equal_one_process(pool: RankPool, world: int) -> None:
    """Parameters, losses and norms within 1e-9 in float64; the same gradients are None."""
    failures = find_failures(pool, draw_specs(EXAMPLES[world], SEED + world, (world,)))
    if failures:
        smallest = explain(shrink(pool, failures[0], tries=40))
        pytest.fail(
            f"{len(failures)} of {EXAMPLES[world]} specs failed, seed {SEED + world}; one of them, "
            f"simplified:\n{smallest}"
        )


@pytest.mark.parametrize("world", EXAMPLES_WITH_CASTS)
def test_drawn_dtypes_and_precisions_equal_one_process_bit_for_bit(
    pool: RankPool, world: int
) -> None:
    """Parameters, losses and norms: what rounds, and in which order, is what `Emulated` says."""
    count = EXAMPLES_WITH_CASTS[world]
    failures = find_failures(pool, draw_specs(count, SEED + world, (world,), casts=True))
    if failures:
        smallest = explain(shrink(pool, failures[0], tries=40))
        pytest.fail(
            f"{len(failures)} of {count} specs failed, seed {SEED + world}; one of them, "
            f"simplified:\n{smallest}"
        )


FOUND_ONCE = {
    "a unit frozen in a step that accumulates": Spec(
        parts=(PartSpec(frozen="once"),), micro_batches=2
    ),
    "the same on replicas": Spec(
        shape=(2, 2), strategy="hybrid", parts=(PartSpec(frozen="once"),), micro_batches=2
    ),
    "a unit used on some ranks only, while accumulating": Spec(
        parts=(PartSpec(side=True), PartSpec()), units="sides", flags=24, micro_batches=2
    ),
    "a unit inside another used on some ranks only": Spec(
        shape=(3, 1), parts=(PartSpec(side=True),), units="sides", micro_batches=3, flags=32
    ),
    "a unit used on some ranks only, and another's output dropped": Spec(
        parts=(PartSpec(side=True), PartSpec(runs="never, output dropped")),
        units="leaves",
        flags=24,
        settings=(("transport", "collective"),),
    ),
    "the same, reduced over replicas": Spec(
        shape=(2, 1),
        parts=(PartSpec(side=True), PartSpec(runs="never, output dropped")),
        units="leaves",
        flags=24,
    ),
    "a second backward that reaches a unit but none of its parameters": Spec(
        shape=(2, 1),
        parts=(PartSpec(kind="convolution", runs="first micro-batch"),),
        units="leaves",
        micro_batches=2,
        style="graph twice",
    ),
    "whole gradients zeroed between micro-batches": Spec(
        strategy="zero1", micro_batches=2, to_none=False, discards=True
    ),
    "divided gradients zeroed between micro-batches": Spec(
        shape=(2, 2),
        strategy="hybrid_full_optimizer",
        micro_batches=2,
        to_none=False,
        discards=True,
    ),
    "gradients reduced in another dtype, zeroed between micro-batches": Spec(
        strategy="zero1",
        micro_batches=2,
        to_none=False,
        discards=True,
        precision=(("reduce", "bfloat16"),),
    ),
    "the same, zeroed after a step, and a parameter without one in the next": Spec(
        strategy="zero1",
        parts=(PartSpec(inner=True, runs="odd steps"),),
        units="bodies",
        micro_batches=2,
        to_none=False,
        precision=(("reduce", "bfloat16"),),
    ),
    "sums over replicas sent late, from a buffer others used since": Spec(
        shape=(2, 2),
        strategy="hybrid",
        parts=(PartSpec(hidden=13),) * 6,
        units="parts",
        evaluates="abandoned",
        settings=(("transport", "collective"),),
        precision=(("reduce", "bfloat16"),),
    ),
    "frozen parameters wider than masters, gathered by the backend": Spec(
        parts=(PartSpec(frozen="some"),),
        settings=(("transport", "collective"),),
        precision=(("master", "bfloat16"),),
    ),
    "kept modules in a unit with wider masters": Spec(
        parts=(PartSpec(norm="layer", dtypes=("float32",)),),
        units="whole",
        dtypes=("float64",),
        precision=(("keep", ("norm", "body")),),
    ),
    "an embedding kept in float32": Spec(
        table="plain", precision=(("param", "bfloat16"), ("keep", ("table",)))
    ),
    "frozen parameters wider than all that train": Spec(
        parts=(PartSpec(frozen="all", dtypes=("float64",)),),
        units="whole",
        dtypes=("float32",),
    ),
    "norms of gradients of several dtypes": Spec(
        parts=(PartSpec(dtypes=("float64",)),), dtypes=("float32",), units="leaves", clip=2.0
    ),
    "means over three ranks in narrow masters": Spec(
        shape=(3, 1), strategy="hybrid", precision=(("reduce", "float32"), ("master", "bfloat16"))
    ),
}


@pytest.mark.parametrize("name", FOUND_ONCE)
def test_specs_that_failed_once_equal_one_process(pool: RankPool, name: str) -> None:
    assert [explain(f) for f in find_failures(pool, [FOUND_ONCE[name]])] == []


def test_the_same_seed_draws_the_same_specs_of_every_kind() -> None:
    drawn = draw_specs(200, seed=1)
    assert drawn == draw_specs(200, seed=1)
    assert drawn != draw_specs(200, seed=2)
    assert {s.world for s in drawn} == {1, 2, 3, 4}
    assert {s.micro_batches for s in drawn} == {1, 2, 3}
    assert {p.kind for s in drawn for p in s.parts} >= {"mlp", "lstm", "attention", "matrices"}


def test_what_explains_a_failure_can_be_pasted_and_gets_simpler() -> None:
    names = {"Spec": Spec, "PartSpec": PartSpec, "math": math}
    for spec in draw_specs(20, seed=3):
        assert eval(brief(spec), names) == spec
        assert all(len(brief(s)) <= len(brief(spec)) for s in simpler(spec))
