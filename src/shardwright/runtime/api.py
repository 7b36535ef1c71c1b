"""The public functions of the engine. `shardwright` re-exports them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from shardwright.core.errors import LifecycleError, SpecError
from shardwright.core.strategy import resolve_strategy
from shardwright.runtime.autograd import find_engine
from shardwright.runtime.build import build_engine
from shardwright.runtime.checkpointing import Policy, checkpoint_blocks
from shardwright.runtime.clip import clip_gradients
from shardwright.runtime.description import Description, describe_engine
from shardwright.runtime.ledger import Ledger
from shardwright.runtime.lookup import require_engine, require_root
from shardwright.runtime.mesh import Mesh, init_mesh
from shardwright.runtime.precision import Precision
from shardwright.runtime.settings import EngineSettings
from shardwright.runtime.units import UnitsArgument
from shardwright.runtime.unsharded import make_plain, unsharded_units
from shardwright.runtime.whole import WholeArgument

__all__ = [
    "accumulate",
    "backward",
    "checkpoint_activations",
    "clip_grad_norm_",
    "describe",
    "ledger",
    "shard",
    "unshard_",
    "unsharded",
]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def shard(
    model: ModuleT,
    strategy: str = "zero3",
    *,
    mesh: Mesh | None = None,
    units: UnitsArgument = "auto",
    precision: Precision | None = None,
    whole: WholeArgument = None,
    initialize: bool = True,
    **settings: Any,
) -> ModuleT:
    """Shard a model in place: the same object, class and names, with its state divided.

    Collective: every data rank calls it with the same model and settings. First values are taken
    from the first data rank, on which the model must be real or built inside `meta_init`; on the
    others it may also be on the meta device. Afterwards ``model.parameters()`` are this rank's
    rows, fit for any elementwise optimizer; inside forward and backward, modules see full
    parameters.

    Args:
        model: A module on the mesh's device, or on the meta device.
        strategy: ``ddp``, ``zero1``, ``zero2``, ``zero3``, ``hybrid``, ``hybrid_zero2``,
            ``hybrid_full_optimizer`` or an alias such as ``full_shard``.
        mesh: From `init_mesh`; by default all ranks shard, or for the hybrids the ranks of a node.
        units: ``"auto"``: repeated blocks, and lone modules that are large beside them; or a
            module class, several, or a predicate; None for one unit.
        precision: Dtypes; by default each parameter's own, with float32 masters or wider.
        whole: Parameters that one rank owns whole, since their optimizer can't work on rows:
            ``"matrices"`` (for Muon), ``"all"`` (for Adafactor), names, or a callable
            ``(name, parameter) -> bool``; always among those that train. On the other ranks such
            a parameter has no rows, and optimizers pass it over.
        initialize: False leaves parameters that are on the meta device without values, which are
            NaN until `load_safetensors` brings them.
        **settings: Fields of `EngineSettings`.

    Returns:
        `model`.

    Raises:
        SpecError: A setting, the mesh or the model can't be used; the message says what to do.
        RankMismatchError: Ranks differ, or another rank failed. The model is unchanged.
    """
    row = resolve_strategy(strategy)
    chosen = EngineSettings.from_options(settings)
    if mesh is None:
        mesh = init_mesh(shard="auto") if row.name.startswith("hybrid") else init_mesh()
    if not isinstance(mesh, Mesh):
        raise SpecError(f"mesh must come from sw.init_mesh(), found {type(mesh).__name__}")
    if precision is not None and not isinstance(precision, Precision):
        raise SpecError(
            f"precision must be sw.Precision(param=..., reduce=...), found {precision!r}"
        )
    build_engine(
        model,
        strategy=row,
        mesh=mesh,
        units=units,
        precision=precision or Precision(),
        settings=chosen,
        whole=whole,
        initialize=initialize,
    )
    return model


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Run micro-batches that are not the last of their step.

    Their gradients are summed, whole or sharded as the strategy says, and reduced over replicas
    with the last micro-batch, which runs outside this context. As in plain torch, the caller
    divides each loss by the number of micro-batches.

    Args:
        model: A sharded model.
    """
    policy = require_engine(model).policy
    before = policy.is_last_micro_batch
    policy.is_last_micro_batch = False
    try:
        yield
    finally:
        policy.is_last_micro_batch = before


def backward(loss_sum: torch.Tensor, num_tokens: int) -> None:
    """Run a backward whose step's gradient is that of the mean over all tokens of all ranks.

    The mean of means is another number where micro-batches differ in length. Here each rank
    passes the *sum* of its micro-batch's token losses and how many there are; after the last
    micro-batch of a step, outside `accumulate`, gradients are divided by the number of tokens of
    all micro-batches of all ranks. Use it for every micro-batch of a step, or for none.

    Args:
        loss_sum: Scalar: sum of token losses, from a sharded model.
        num_tokens: Tokens in it, 0 or more.

    Raises:
        SpecError: `num_tokens` is negative.
        LifecycleError: The loss depends on no sharded model, or gradients of an earlier step are
            still there.
    """
    if num_tokens < 0:
        raise SpecError(f"num_tokens must be 0 or more, found {num_tokens}")
    engine = None if loss_sum.grad_fn is None else find_engine(loss_sum.grad_fn)
    if engine is None:
        raise LifecycleError(
            "sw.backward() takes a loss computed by a sharded model with gradients enabled; this "
            "one depends on none. Call loss.backward() for plain models."
        )
    is_last = engine.policy.is_last_micro_batch
    engine.reducer.count_tokens(num_tokens, engine.mesh.data_axis, is_last=is_last)
    loss_sum.backward()


def unsharded(module: nn.Module, *, writeback: bool = False) -> AbstractContextManager[None]:
    """Have full parameters on every rank inside a ``with`` block.

    Collective over the data ranks, which all hold the whole module's parameters meanwhile, in the
    masters' dtype. `state_dict`, `load_state_dict` and methods such as ``generate`` work inside;
    training does not.

    Args:
        module: A sharded model or any of its sub-modules.
        writeback: Take over changes of the parameters at the end; every rank must make the same.
    """
    return unsharded_units(require_engine(module), module, writeback=writeback)


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their norm over the whole model is at most `max_norm`.

    Collective over the data ranks. ``torch.nn.utils.clip_grad_norm_`` would see this rank's rows
    only and give each rank another norm: use this instead.

    Args:
        model: A sharded model, after its last backward of the step.
        max_norm: Largest norm allowed.
        norm_type: Order of the norm; ``math.inf`` for the largest element.
        error_if_nonfinite: Raise on all ranks if the norm is NaN or infinite.

    Returns:
        Scalar tensor on the mesh's device: the global norm before clipping, bitwise equal on all
        ranks.
    """
    engine = require_engine(model)
    engine.reducer.check_complete()
    order = math.inf if str(norm_type).lower() == "inf" else float(norm_type)
    return clip_gradients(engine, max_norm, order, error_if_nonfinite=error_if_nonfinite)


def checkpoint_activations(
    model: ModuleT, units: UnitsArgument = "auto", policy: Policy = "full"
) -> ModuleT:
    """Keep only the inputs of a model's blocks through forward, and compute the rest again.

    Names in state dicts stay the same, random state is restored for the recomputation, and the
    order with `shard` is free. Under a sharding strategy a block is recomputed while it is
    gathered for its backward, at no further communication.

    Args:
        model: The model, sharded or not; changed in place.
        units: Which blocks: ``"auto"`` for repeated ones, or as in `shard`.
        policy: ``"full"``: everything is recomputed; ``"selective"``: results of matrix products
            and attention are kept; or a policy function of
            ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.

    Returns:
        `model`.

    Raises:
        SpecError: The policy is unknown, or no block is found.
        LifecycleError: A block is checkpointed already.
    """
    checkpoint_blocks(model, units, policy)
    return model


def unshard_(model: ModuleT) -> ModuleT:
    """Make a sharded model plain again, with full parameters on every rank, in place.

    Collective over the data ranks, each of which must have room for the whole model. Parameters
    keep their identity and get back the dtype they had before `shard`; their gradients are
    dropped, and optimizers hold state for shards: build a new one.

    Args:
        model: The model that was given to `shard`.

    Returns:
        `model`.

    Raises:
        LifecycleError: `model` is only a part of a sharded model, or a pass is under way.
    """
    make_plain(require_root(model, "unshard_()"))
    return model


def describe(model: nn.Module) -> Description:
    """Say how a model is sharded: units, who owns what, bytes per rank, transport, settings.

    Returns:
        A description; print it, or read its fields.
    """
    return describe_engine(require_engine(model))


def ledger(model: nn.Module) -> Ledger:
    """The running account of what this rank holds and sends for a sharded model."""
    return require_engine(model).ledger
