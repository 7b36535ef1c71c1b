"""The rows of the table. Each says what is done and how the model trains; the truth is one process.

Keys that begin with R number the rows of the project's catalogue of reported troubles; those that
begin with X were added for this table.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from benchmarks.correctness import bodies, models, special
from benchmarks.correctness.engines.base import Engine, Setup
from benchmarks.correctness.findings import Finding
from benchmarks.correctness.models import Block
from benchmarks.correctness.training import Run, Training, World, compare_training

__all__ = ["SCENARIOS", "Scenario"]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One row.

    Attributes:
        title: A few words.
        does: What is done, and in which way by each engine where they differ.
        ranks: How many.
        check: Runs on every rank.
        setup: What it asks of an engine.
        timeout_s: Without progress of any rank, after which they count as hanging.
    """

    title: str
    does: str
    ranks: int
    check: Callable[[Engine, World], list[Finding]]
    setup: Setup = field(default_factory=Setup)
    timeout_s: float = 30.0


def _trains(title: str, does: str, training: Training, *, ranks: int = 2) -> Scenario:
    check = functools.partial(compare_training, training)
    return Scenario(title=title, does=does, ranks=ranks, check=check, setup=training.setup)


def _tied(run: Run) -> dict[str, torch.Tensor]:
    inner = run.session.inner
    return {"one object": torch.tensor(float(inner.emb.weight is inner.head.weight))}


def _ones_and_threes(_: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    values = [1.0 if row < 2 else 3.0 for row in range(rows)]
    return torch.tensor(values, dtype=dtype)[:, None]


def _generated(run: Run) -> dict[str, torch.Tensor]:
    x = torch.ones(2, 4, models.WIDTH, dtype=run.dtype)
    return {"generated": run.session.generate(x).detach().clone()}


def _plain_norm(run: Run) -> dict[str, torch.Tensor]:
    return {"norm of a weight": torch.tensor(float(run.session.weight().detach().norm()))}


def _own_norm(run: Run) -> dict[str, torch.Tensor]:
    return {"norm of a weight": torch.tensor(run.session.weight_norm())}


_MICRO_BATCHES = Setup(backwards_per_step=4)
_TWO_BACKWARDS = Setup(backwards_per_step=2)
_UNUSED = Setup(unused="everywhere")
_CLIP = {"model": models.BigAndSmall, "clips": True}
_NOTHING_BETWEEN = Setup(keeps_gathered=True, prefetches=True)

SCENARIOS: dict[str, Scenario] = {
    "R1a": _trains(
        "tied weights, embedding a unit of its own",
        "The head's weight is the embedding's; blocks and embedding are units, the head belongs to "
        "the root, as when a policy matches Embedding. One parameter before and after.",
        Training(model=models.Tied, setup=Setup(units=(Block, nn.Embedding)), reads_after=_tied),
    ),
    "R1b": _trains(
        "tied weights, embedding and head in the root",
        "The same with blocks as the only units.",
        Training(model=models.Tied, reads_after=_tied),
    ),
    "R2a": _trains(
        "accumulation, reduced once",
        "Four micro-batches in each engine's own context for accumulation (DeepSpeed: its "
        "setting); equals four times the batch.",
        Training(setup=_MICRO_BATCHES, micro_batches=4),
    ),
    "R2b": _trains(
        "accumulation, reduced every time",
        "Four backwards outside any context, then a step.",
        Training(setup=_MICRO_BATCHES, micro_batches=4, accumulates=False),
    ),
    "R3a": _trains(
        "clipping, 2-norm",
        "Parameters of very different scales, one with fewer rows than ranks; norm and parameters. "
        "FSDP1: its own method, in float32, since it refuses float64; FSDP2: torch's function and "
        "full_tensor() of what it returns.",
        Training(setup=Setup(max_norm=0.1), **_CLIP),  # type: ignore[arg-type]
        ranks=3,
    ),
    "R3b": _trains(
        "clipping, inf-norm",
        "The same by the largest element.",
        Training(setup=Setup(max_norm=0.1, norm_type=math.inf), **_CLIP),  # type: ignore[arg-type]
        ranks=3,
    ),
    "R3c": _trains(
        "the norm as logged",
        "As R3a, but the norm is what float() makes of the returned value.",
        Training(setup=Setup(max_norm=0.1), logs_norm=True, **_CLIP),  # type: ignore[arg-type]
        ranks=3,
    ),
    "R5": _trains(
        "frozen weights with adapters in one unit",
        "Frozen linear layers and trained rank-2 adapters share units. The frozen stay bitwise.",
        Training(
            model=models.Adapted,
            setup=Setup(units=(models.Adapter,)),
            exact=("blocks.0.base.weight", "blocks.2.base.bias"),
            compares_none=True,
        ),
    ),
    "R6": _trains(
        "two dtypes in one unit",
        "Blocks store their norms in float32 and their linear layers in bfloat16; within 1e-2 of "
        "one process, and the norms compute in float32.",
        Training(
            model=models.MixedDtypes,
            setup=Setup(units=(models.MixedBlock,)),
            dtype=torch.float32,
            tolerance=1e-2,
        ),
    ),
    "R8": _trains(
        "sizes that don't divide",
        "Linear(7, 5), Embedding(13, 3), Conv1d(3, 5, 3) on three ranks; first values bitwise.",
        Training(model=models.Uneven, setup=Setup(units=(nn.Linear, nn.Conv1d)), first_state=True),
        ranks=3,
    ),
    "R9a": _trains(
        "fewer rows than ranks",
        "Parameters of one row on four ranks.",
        Training(model=models.FewRows, setup=Setup(units=(nn.Linear,)), first_state=True),
        ranks=4,
    ),
    "R9b": _trains(
        "a scalar parameter",
        "The same with a parameter of no dimensions in the root.",
        Training(model=models.Scalars, setup=Setup(units=(nn.Linear,)), first_state=True),
        ranks=4,
    ),
    "R10a": _trains(
        "hybrid, 4 replicas of 1 shard",
        "Every shard group is one rank; gradients are averaged over the replicas.",
        Training(setup=Setup(shape=(4, 1))),
        ranks=4,
    ),
    "R10b": _trains(
        "hybrid, 1 replica of 4 shards",
        "One replica only.",
        Training(setup=Setup(shape=(1, 4))),
        ranks=4,
    ),
    "R11": _trains(
        "hybrid 2x2, accumulation",
        "Two micro-batches; copies bitwise equal. FSDP2: set_requires_all_reduce(False) before the "
        "last; FSDP1: no_sync.",
        Training(setup=Setup(shape=(2, 2), backwards_per_step=2), micro_batches=2),
        ranks=4,
    ),
    "R12": _trains(
        "gloo averages",
        "Gradients 1 and 3 on two ranks make 2.",
        Training(
            model=models.OneWeight,
            setup=Setup(units=(nn.Linear,)),
            data=_ones_and_threes,
            body=bodies.mean_of_outputs,
            steps=1,
        ),
    ),
    "R13": Scenario(
        title="buffers from the meta device",
        does="Real values on the first rank, meta elsewhere; parameters, buffers and "
        "non-persistent buffers bitwise the first rank's, with fresh memory full of NaN. FSDP2: "
        "to_empty and set_model_state_dict(broadcast_from_rank0=True); FSDP1: sync_module_states; "
        "DDP: to_empty.",
        ranks=2,
        check=special.buffers_from_meta,
    ),
    "R16": Scenario(
        title="first values don't depend on the number of ranks",
        does="From the meta device and one seed, on four ranks and on one by the same procedure; "
        "bitwise. FSDP2: to_empty, the seed, reset_parameters; FSDP1: its own reset_parameters; "
        "DeepSpeed: zero.Init.",
        ranks=4,
        check=special.first_values,
    ),
    "R17": Scenario(
        title="names under activation checkpointing",
        does="torch's checkpoint wrapper on every block (Shardwright: checkpoint_activations); "
        "numbers, names of the whole state, and a plain model's state loads.",
        ranks=2,
        check=special.names_under_checkpointing,
    ),
    "R25a": _trains(
        "overflow on one rank, loss scaler",
        "One gradient element is infinite on the second rank in step 1; all ranks skip it and "
        "halve the scale. FSDP1: ShardedGradScaler; FSDP2 and DDP: torch.amp.GradScaler.",
        Training(
            model=models.Overflows,
            setup=Setup(scales_loss=True),
            data=bodies.overflowing_data,
            body=bodies.scales,
            update=bodies.steps_with_scaler,
            reads_after=bodies.reads_scale,
        ),
    ),
    "R25b": _trains(
        "overflow on one rank, step skipped by the norm",
        "The same without scaler: each rank steps if the norm of its clipping is finite.",
        Training(
            model=models.Overflows,
            setup=Setup(max_norm=1.0, skips_by_norm=True),
            data=bodies.overflowing_data,
            update=bodies.skips_if_not_finite,
        ),
    ),
    "R26a": _trains(
        "parameters unused on all ranks",
        "A layer and a vector of the root are used in every second step; gradients are None as in "
        "one process, which weight decay and momentum show.",
        Training(model=models.UnusedEverywhere, setup=_UNUSED, compares_none=True, steps=4),
    ),
    "R26b": _trains(
        "a unit unused on all ranks",
        "A block is left out in every second step.",
        Training(model=models.SkipsABlock, setup=_UNUSED, compares_none=True, steps=4),
    ),
    "R26c": _trains(
        "parameters unused on some ranks",
        "A part computes nothing on the first rank, so its vector and layer aren't used there. "
        "DDP: find_unused_parameters; FSDP2: set_reduce_scatter_unused_params; DeepSpeed: "
        "set_z3_leaf_modules.",
        Training(
            model=models.UnusedOnSomeRanks,
            setup=Setup(unused="somewhere", chooses=(models.Chooser,)),
        ),
    ),
    "R28a": _trains(
        "units called twice in one forward",
        "Every block runs twice in a row.",
        Training(model=models.CallsBlocksTwice),
    ),
    "R28b": _trains(
        "units called twice, recomputed",
        "The same with activation checkpointing of the blocks.",
        Training(model=models.CallsBlocksTwice, setup=Setup(checkpoints=(Block,))),
    ),
    "R29a": _trains(
        "two forwards, two backwards",
        "Backwards in the order of the forwards. DeepSpeed: inside coalesce_grad_reduction.",
        Training(body=bodies.two_backwards),
    ),
    "R29b": _trains(
        "two forwards, two backwards reversed",
        "Backwards in the other order.",
        Training(body=bodies.two_backwards_reversed),
    ),
    "R29c": _trains(
        "two forwards, one backward",
        "One backward of the sum of two losses.",
        Training(body=bodies.one_backward),
    ),
    "R32a": _trains(
        "outputs: dicts with None and numbers",
        "Blocks return dicts.",
        Training(model=models.PassesDicts, setup=Setup(units=(models.DictBlock,))),
    ),
    "R32b": _trains(
        "outputs: dataclasses",
        "Blocks take and return dataclasses.",
        Training(model=models.PassesDataclasses, setup=Setup(units=(models.DataclassBlock,))),
    ),
    "R32c": _trains(
        "outputs: views written in place",
        "The model multiplies in place the views that its blocks return.",
        Training(model=models.WritesIntoViews, setup=Setup(units=(models.ViewBlock,))),
    ),
    "R32d": _trains(
        "outputs: a weight",
        "Blocks return their weight, and the model adds a penalty on it.",
        Training(model=models.ReturnsWeights, setup=Setup(units=(models.WeightBlock,))),
    ),
    "R34a": _trains(
        "model.forward(x)",
        "In place of model(x).",
        Training(body=bodies.calls_forward_by_name),
    ),
    "R34b": _trains(
        "an entry that isn't forward",
        "A generate method that runs the parts, after training. FSDP2: "
        "register_fsdp_forward_method; FSDP1: summon_full_params of the root; DeepSpeed: "
        "GatheredParameters; Shardwright: unsharded.",
        Training(reads_after=_generated),
    ),
    "R34c": _trains(
        "a penalty on a weight outside its forward",
        "The loss has a term on a block's weight, read after the forward. FSDP2: full_tensor().",
        Training(body=bodies.penalises_a_weight),
    ),
    "R34d": _trains(
        "the norm of a weight, read as in a plain model",
        "float(weight.detach().norm()) of a block's weight between steps.",
        Training(reads_after=_plain_norm),
    ),
    "R34e": _trains(
        "the norm of a weight, read in the engine's way",
        "FSDP2: full_tensor(); FSDP1: summon_full_params; DeepSpeed: GatheredParameters; "
        "Shardwright: unsharded.",
        Training(reads_after=_own_norm),
    ),
    "R36a": _trains(
        "evaluation in between",
        "Two forwards without gradients before every training pass.",
        Training(body=bodies.evaluates),
    ),
    "R36b": _trains(
        "evaluation in between, ZeRO-2 with prefetch",
        "The same, parameters kept from forward to backward and asked for ahead.",
        Training(body=bodies.evaluates, setup=_NOTHING_BETWEEN),
    ),
    "R36c": _trains(
        "evaluation between backward and step",
        "One forward without gradients after backward, then the optimizer's step.",
        Training(body=bodies.evaluates_before_the_step),
    ),
    "R37a": _trains(
        "an exception in forward on all ranks, then a retry",
        "All ranks catch it and repeat the step. FSDP2: reset_iter_state.",
        Training(body=bodies.fails_in_forward),
    ),
    "R37b": _trains(
        "an exception in backward on all ranks, then a retry",
        "The same in a block's backward.",
        Training(body=bodies.fails_in_backward),
    ),
    "R37c": Scenario(
        title="an exception on one rank, which ends",
        does="The others must raise within 10 s.",
        ranks=3,
        check=special.one_rank_raises,
    ),
    "R37d": Scenario(
        title="an exception on one rank, which stays",
        does="The rank catches its exception and lives on; the others must raise within 10 s.",
        ranks=3,
        check=special.one_rank_raises_and_stays,
        timeout_s=20.0,
    ),
    "R38a": _trains(
        "optimizer built before the engine",
        "From the plain model's parameters.",
        Training(setup=Setup(optimizer_first=True)),
    ),
    "R38b": _trains(
        "optimizer built after a first evaluation",
        "The engine's model runs once without gradients before the optimizer is built.",
        Training(setup=Setup(warm_up=bodies.warm_up)),
    ),
    "R40": _trains(
        "token mean",
        "Two micro-batches of other numbers of tokens on each rank; the mean over all tokens. "
        "Peers: sums times ranks over the total, worked out by hand; Shardwright: sw.backward.",
        Training(setup=_TWO_BACKWARDS, body=bodies.token_mean, micro_batches=2),
    ),
    "R41": Scenario(
        title="one rank runs out of data",
        does="Five batches on the first rank, three on the other; a step's mean is over the ranks "
        "that have data, and after the loop all gather the state. DDP: Join with "
        "divide_by_initial_world_size=False; Shardwright: even_batches; FSDP and DeepSpeed have "
        "nothing for it and run a plain loop.",
        ranks=2,
        check=special.runs_out_of_data,
    ),
    "R42a": _trains(
        "a module shared between units",
        "All blocks use one norm.",
        Training(model=models.SharesANorm),
    ),
    "R42b": _trains(
        "a shared module as a unit",
        "The same with the norm a unit of its own.",
        Training(model=models.SharesANorm, setup=Setup(units=(nn.LayerNorm, Block))),
    ),
    "X1": _trains(
        "one forward, two backwards",
        "By retain_graph. DeepSpeed: inside coalesce_grad_reduction.",
        Training(body=bodies.same_graph_twice),
    ),
    "X2": _trains(
        "a unit whose output is dropped",
        "A block runs, and its result is used in every second step only.",
        Training(model=models.DropsAnOutput, setup=_UNUSED, compares_none=True, steps=4),
    ),
    "X3": _trains(
        "two halves trained in turns",
        "Every step uses every second block only.",
        Training(model=models.TakesTurns, setup=_UNUSED, compares_none=True, steps=4),
    ),
    "X4": _trains(
        "frozen for a while",
        "A block's requires_grad changes every step.",
        Training(model=models.FreezesForAWhile, setup=_UNUSED, compares_none=True, steps=4),
    ),
    "X5": _trains(
        "gradients of the inputs first",
        "torch.autograd.grad by the input, then a step on the changed input.",
        Training(body=bodies.uses_input_gradients),
    ),
    "X6": _trains(
        "weights edited in place",
        "All parameters are scaled between two forwards. FSDP2: after reshard(); FSDP1: "
        "summon_full_params(writeback=True); DeepSpeed: GatheredParameters and "
        "safe_set_full_fp32_param.",
        Training(body=bodies.edits_weights),
    ),
    "X7": _trains(
        "gradients set to zero, not None",
        "zero_grad(set_to_none=False), and a layer unused in every second step.",
        Training(model=models.UnusedEverywhere, setup=_UNUSED, set_to_none=False, steps=4),
    ),
}
