"""Draws specs of models and ways of training, runs them on a pool's ranks and shrinks failures.

The same seed draws the same specs, so a run can be repeated and extended:

    python -m tests.support.drawn --examples 500 --seed 1
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.drawn import STYLES, PartSpec, Spec, brief, compare, simpler
from tests.support.parity import STRATEGIES
from tests.support.pool import RankPool

SHAPES = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1))
BATCH = 12
"""Specs per job of the pool."""

Failure = tuple[Spec, list[str]]

_RUNS = [
    "always",
    "even steps",
    "odd steps, output dropped",
    "even steps, output dropped",
    "odd steps",
    "first micro-batch",
    "last micro-batch",
    "never",
    "never, output dropped",
]


def part_specs() -> st.SearchStrategy[PartSpec]:
    return st.builds(
        PartSpec,
        kind=st.sampled_from(["mlp", "mlp", "convolution", "lstm", "attention", "matrices"]),
        hidden=st.sampled_from([1, 2, 3, 5, 8, 13]),
        norm=st.sampled_from(["", "layer", "rms", "shared"]),
        bias=st.booleans(),
        scalars=st.booleans(),
        side=st.booleans(),
        inner=st.booleans(),
        frozen=st.sampled_from(["", "", "", "some", "all", "once"]),
        picked=st.booleans(),
        runs=st.one_of(st.just("always"), st.sampled_from(_RUNS)),
        calls=st.sampled_from([1, 1, 1, 2]),
        ties=st.booleans(),
    )


def engine_settings(strategy: str) -> st.SearchStrategy[tuple[tuple[str, object], ...]]:
    """Some settings, of those the strategy allows."""
    choices: dict[str, st.SearchStrategy[object]] = {
        "forward_prefetch": st.integers(0, 2),
        "backward_prefetch": st.integers(0, 2),
        "backward_prefetch_at": st.sampled_from(["pre", "post"]),
        "max_in_flight": st.integers(1, 3),
        "reduce_in_flight": st.integers(0, 2),
        "accumulation": st.sampled_from(["whole", "sharded"]),
        "direct_gradients": st.booleans(),
        "transport": st.sampled_from(["auto", "collective"]),
    }
    if strategy in ("zero1", "zero2", "hybrid_zero2"):
        choices["reshard_after_backward"] = st.booleans()
    drawn = st.fixed_dictionaries({}, optional=choices)
    return drawn.map(lambda d: tuple(sorted(d.items())))


@st.composite
def specs(draw: st.DrawFn, worlds: tuple[int, ...]) -> Spec:
    shape = draw(st.sampled_from([s for s in SHAPES if s[0] * s[1] in worlds]))
    strategy = draw(st.sampled_from(STRATEGIES))
    parts = draw(st.lists(part_specs(), min_size=2, max_size=6))
    divisions = ["auto", "auto", "parts", "nested", "sides", "picked", "bodies", "whole"]
    if not any(p.kind in ("attention", "matrices") for p in parts):
        divisions.append("leaves")
    return Spec(
        shape=shape,
        strategy=strategy,
        width=draw(st.sampled_from([1, 2, 3, 5, 7])),
        parts=tuple(parts),
        repeats=tuple(draw(st.lists(st.integers(0, 5), max_size=3))),
        registered_again=draw(st.sampled_from([-1, -1, -1, 0, 1])),
        table=draw(st.sampled_from(["", "plain", "tied"])),
        units=draw(st.sampled_from(divisions)),
        micro_batches=draw(st.integers(1, 3)),
        accumulates=draw(st.booleans()),
        optimizer=draw(st.sampled_from(["sgd", "adamw", "fused adamw"])),
        clip=draw(st.sampled_from([0.0, 2.0, 2.0, 1.0, math.inf])),
        to_none=draw(st.booleans()),
        style=draw(st.one_of(st.just("plain"), st.sampled_from(sorted(STYLES)))),
        discards=draw(st.booleans()),
        evaluates=draw(st.sampled_from(["", "without gradients", "abandoned"])),
        checkpoints=draw(st.sampled_from(["", "", "before", "after"])),
        residency=draw(st.sampled_from([0, 0, 1, 2, 5, 14, 255])),
        flags=draw(st.integers(0, 63)),
        settings=draw(engine_settings(strategy)),
        seed=draw(st.integers(0, 99)),
    )


_DTYPES = ["float64", "float32", "float32", "bfloat16"]
_KEPT = ["norm", "inner", "side", "body", "body.down", "first"]


def dtypes(max_size: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(_DTYPES), min_size=1, max_size=max_size).map(tuple)


@st.composite
def precisions(draw: st.DrawFn, spec: Spec) -> tuple[tuple[str, object], ...]:
    """Fields of `sw.Precision`, without what it refuses: kept parameters tied to others."""
    kept = list(_KEPT)
    if spec.table != "tied":
        kept += ["head", "table"]
    if not any(p.ties or p.norm == "shared" for p in spec.parts):
        kept.append("parts.0")
    if not any(p.kind == "matrices" for p in spec.parts):
        kept.append("body.up")
    wide, wire = ["float32", "float64"], ["bfloat16", "float16", "float32", "float64"]
    choices: dict[str, st.SearchStrategy[object]] = {
        "param": st.sampled_from(["bfloat16", "bfloat16", *wire]),
        "reduce": st.sampled_from(["bfloat16", *wire]),
        "buffer": st.sampled_from(["bfloat16", *wide]),
        "output": st.sampled_from(["bfloat16", *wide]),
        "master": st.sampled_from(["bfloat16", *wide]),
        "keep": st.lists(st.sampled_from(kept), min_size=1, max_size=3, unique=True).map(tuple),
    }
    return tuple(draw(st.fixed_dictionaries({}, optional=choices)).items())


@st.composite
def cast_specs(draw: st.DrawFn, worlds: tuple[int, ...]) -> Spec:
    """Specs with dtypes other than float64, of those whose bits one process can foretell.

    That leaves out two backwards in one micro-batch, where ranks take turns; the order in which a
    backend adds up more than two; and sums inside a matrix product, as layers that write their
    gradients directly do.
    """
    spec = draw(specs(worlds))
    parts = tuple(
        dataclasses.replace(p, shift=draw(st.booleans()), dtypes=draw(dtypes(6)))
        for p in spec.parts
    )
    widest = spec.world if spec.strategy == "ddp" else max(spec.shape)
    left_out = {"direct_gradients"} | ({"transport"} if widest > 2 else set())
    options = [(name, value) for name, value in spec.settings if name not in left_out]
    spec = dataclasses.replace(
        spec,
        parts=parts,
        dtypes=draw(dtypes(3)),
        style=draw(st.sampled_from(["plain", "two forwards"])),
        settings=tuple(options),
    )
    return dataclasses.replace(spec, precision=draw(precisions(spec)))


def draw_specs(
    count: int, seed: int, worlds: tuple[int, ...] = (1, 2, 3, 4), *, casts: bool = False
) -> list[Spec]:
    """Draw specs, in float64 or with casts; the same for the same arguments."""
    found: list[Spec] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(cast_specs(worlds) if casts else specs(worlds))
    def collect(spec: Spec) -> None:
        found.append(spec)

    collect()
    return found


def find_failures(
    pool: RankPool, drawn: list[Spec], report: Callable[[str], None] = lambda _: None
) -> list[Failure]:
    """Compare specs on the pool, world by world; returns those that went wrong."""
    failures: list[Failure] = []
    for world in sorted({s.world for s in drawn}):
        waiting = [s for s in drawn if s.world == world]
        while waiting:
            batch = waiting[:BATCH]
            results = run(pool, batch)
            failures += [(s, r) for s, r in zip(batch, results, strict=False) if r]
            waiting = waiting[len(results) :]
            report(f"world {world}: {len(waiting)} to go, {len(failures)} failed in all")
    return failures


def run(pool: RankPool, batch: list[Spec]) -> list[list[str]]:
    """What went wrong with each spec, up to the first that raised or hung."""
    __tracebackhide__ = True
    try:
        outcomes = pool.attempt(batch[0].world, compare, specs=batch, timeout_s=120.0)
    except AssertionError as error:
        if len(batch) == 1:
            return [[str(error)]]
        return list(itertools.chain.from_iterable(_one_by_one(pool, batch)))
    if any(o.failure for o in outcomes):
        if len(batch) == 1:
            return [[f"rank {o.rank}: {o.raised} {o.message}" for o in outcomes if o.failure]]
        return list(itertools.chain.from_iterable(_one_by_one(pool, batch)))
    length = min(len(o.result) for o in outcomes)
    return [_merged([o.result[i] for o in outcomes]) for i in range(length)]


def _merged(results: list[list[str]]) -> list[str]:
    """What the ranks found wrong with one spec, each text once."""
    ranks: dict[str, list[int]] = {}
    for rank, texts in enumerate(results):
        for text in texts:
            ranks.setdefault(text, []).append(rank)
    return [f"ranks {found}: {text}" for text, found in ranks.items()]


def _one_by_one(pool: RankPool, batch: list[Spec]) -> list[list[list[str]]]:
    return [run(pool, [spec]) for spec in batch]


def shrink(pool: RankPool, failure: Failure, tries: int = 150) -> Failure:
    """Simplify a failing spec while it goes on failing."""
    is_simpler = True
    while is_simpler:
        is_simpler = False
        for candidate in simpler(failure[0]):
            tries -= 1
            if tries < 0:
                return failure
            (wrong,) = run(pool, [candidate])
            if wrong:
                failure, is_simpler = (candidate, wrong), True
                break
    return failure


def explain(failure: Failure) -> str:
    return "\n".join([brief(failure[0]), *(f"    {text}" for text in failure[1])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--casts", action="store_true", help="draw dtypes too")
    parser.add_argument("--shrink", type=int, default=3, help="failures to shrink")
    arguments = parser.parse_args()
    started = time.monotonic()
    pool = RankPool()
    worlds = tuple(arguments.worlds)
    drawn = draw_specs(arguments.examples, arguments.seed, worlds, casts=arguments.casts)
    failures = find_failures(pool, drawn, lambda line: print(line, flush=True))
    for failure in failures:
        print(f"\nfailed: {explain(failure)}")
    for failure in failures[: arguments.shrink]:
        print(f"\nshrunk: {explain(shrink(pool, failure))}", flush=True)
    pool.close()
    print(
        f"{len(drawn)} specs, seed {arguments.seed}: {len(failures)} failed, "
        f"{time.monotonic() - started:.0f} s"
    )
    sys.exit(bool(failures))
