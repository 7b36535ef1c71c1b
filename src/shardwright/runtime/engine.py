"""The engine: feeds hooks' events to the policy and carries its actions out.

One `Engine` serves one sharded model on one rank. A step runs through it like this:

    run_forward ─ policy.forward_enter ─ UNSHARD, FORWARD ─ inner forward ─ policy.forward_exit
    backward_begins ─ policy.backward_enter ─ UNSHARD, BACKWARD
    gradients_ready ─ collect ─ policy.backward_exit ─ REDUCE, REPLICATE, RESHARD
    backward_ends ─ policy.backward_end ─ settle, scale, assign `.grad`
    before_step / after_step ─ policy.step

Gradients are in `gradients.py`, tensors and operations in `unit.py`, streams in `lanes.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from shardwright.core.errors import LifecycleError
from shardwright.core.policy import REPLICATE, Action, Op, Policy
from shardwright.core.strategy import Gathered, Strategy
from shardwright.runtime.autograd import BackwardHook, Call, make_aliases, watch_outputs
from shardwright.runtime.buffers import Buffers
from shardwright.runtime.compiling import compiled_inside, pause, resume, skipped_by_compiler
from shardwright.runtime.direct_linear import write_indirectly
from shardwright.runtime.failure import Waiting
from shardwright.runtime.gradients import GradientReducer
from shardwright.runtime.lanes import Lanes
from shardwright.runtime.ledger import Ledger
from shardwright.runtime.mesh import Mesh
from shardwright.runtime.precision import Precision, cast_floating, map_tensors
from shardwright.runtime.transport.base import Transport
from shardwright.runtime.unit import ShardedUnit

__all__ = ["Engine", "UnitForward"]


class Removable(Protocol):
    """What was put somewhere and can be taken out again."""

    def remove(self) -> None:
        """Take it out."""


class UnitForward:
    """Stands in for `forward` on a unit's module, so that `module.forward(x)` works too."""

    def __init__(self, engine: Engine, unit: ShardedUnit, inner: Callable[..., Any]) -> None:
        self.engine = engine
        self.unit = unit
        self.inner = inner
        self._gave_way = False

    @skipped_by_compiler
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with its parameters gathered."""
        return _run_unit(self, args, kwargs)

    def give_way_to_compiler(self) -> None:
        """Let the module's layers compute their gradients as a compiler wants them."""
        if not self._gave_way:
            self._gave_way = True
            write_indirectly(self.unit.modules.module)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's own forward; stands in for `nn.Module.compile`."""
        self.give_way_to_compiler()
        self.inner = torch.compile(self.inner, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise LifecycleError(
            "a sharded model cannot be deep-copied: its parameters are views of shared buffers. "
            "Copy it before sw.shard(), or copy full values inside sw.unsharded(model). For "
            "averages of its weights use sw.EMA(model, decay) instead of a copying AveragedModel."
        )


@skipped_by_compiler
def _run_unit(forward: UnitForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    compiler = pause()
    try:
        if compiler is not None:
            forward.give_way_to_compiler()
        inner = compiled_inside(forward.inner, compiler)
        return forward.engine.run_forward(forward.unit, inner, args, kwargs)
    finally:
        resume(compiler)


class _BackwardEnd:
    """Called when a backward has ended; dropped uncalled when it raised."""

    __slots__ = ("_engine", "_is_called")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_called = False

    def __call__(self) -> None:
        self._is_called = True
        try:
            self._engine.backward_ends()
        except Exception as error:
            self._engine.backward_end_broke(error)
            raise

    def __del__(self) -> None:
        if not self._is_called:
            self._engine.backward_broke()


class Engine:
    """Runs the units of one model.

    Args:
        model: The module that was sharded.
        units: Its units, bound to buffers; index 0 is the root.
        policy: Decides.
        lanes: Streams.
        reducer: Takes gradients from autograd to the shards.
        ledger: Counts.
        waiting: Wraps every wait for other ranks.
        buffers: Owns the memory.
        slots: The parameter slots, flat uint8; grows when units are found to overlap.
        transport: Prepares operations for units that move.
        precision: Casts of inputs and outputs.
        mesh: The mesh the model is sharded over.
        strategy: How.
        poisons_released: Whether released slots are overwritten with NaN.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        units: Sequence[ShardedUnit],
        policy: Policy,
        lanes: Lanes,
        reducer: GradientReducer,
        ledger: Ledger,
        waiting: Waiting,
        buffers: Buffers,
        slots: list[torch.Tensor],
        transport: Transport,
        precision: Precision,
        mesh: Mesh,
        strategy: Strategy,
        poisons_released: bool = False,
    ) -> None:
        self.model = model
        self.units = list(units)
        self.policy = policy
        self.lanes = lanes
        self.reducer = reducer
        self.ledger = ledger
        self.monitor = mesh.monitor
        self.waiting = waiting
        self.buffers = buffers
        self.slots = slots
        self.transport = transport
        self.precision = precision
        self.mesh = mesh
        self.strategy = strategy
        self._poisons_released = poisons_released
        self.hook_handles: list[Removable] = []
        self.generation = 0
        self.unit_of_parameter = {id(p): u for u in self.units for p in u.parameters}
        self.shard_pointers = {
            id(p): s.data_ptr()
            for u in self.units
            for p, s in zip(u.parameters, u.shards, strict=True)
            if s.numel()
        }
        self._by_name = {u.name: u for u in self.units}
        self._anchor = torch.empty(0, device=buffers.device, requires_grad=True)
        self._open_calls: dict[int, list[Call]] = {u.index: [] for u in self.units}
        for unit in self.units:
            for sink in unit.gradient.sinks if unit.gradient is not None else ():
                sink.open_calls = self._open_calls[unit.index]
        self._backward_tasks: list[int] = []
        self._last_backward_unit = ""
        self._reporting: threading.Thread | None = None
        self._gathering_in_slot: dict[int, ShardedUnit] = {}
        self._carry_out: dict[Op, Callable[[ShardedUnit, Action], None]] = {
            Op.UNSHARD: self._unshard,
            Op.FORWARD: self._await_parameters,
            Op.BACKWARD: self._await_parameters,
            Op.RESHARD: self._reshard,
            Op.REDUCE: self._reduce,
            Op.REPLICATE: lambda unit, _: self.reducer.request_replicate(unit),
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise LifecycleError(
            "a sharded model cannot be deep-copied: its parameters are views of shared buffers. "
            "Copy it before sw.shard(), or copy full values inside sw.unsharded(model). For "
            "averages of its weights use sw.EMA(model, decay) instead of a copying AveragedModel."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise LifecycleError(
            "a sharded model cannot be pickled: it is tied to its process group. Save "
            "model.state_dict() inside `with sw.unsharded(model):`, on one rank."
        )

    # Forward

    def run_forward(
        self,
        unit: ShardedUnit,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a unit's forward with its parameters gathered and visible.

        Lane: compute. Waits: for the unit's gather. Signals: the release of its slot.
        """
        if self._backward_tasks and torch._C._current_graph_task_id() == -1:
            self._recover_from_backward()
        if unit.is_shadowed or unit.is_unsharded_by_user:
            return inner(*args, **kwargs)  # re-entered, or recomputed inside its own backward
        is_outermost = not self.policy.is_any_open()
        if is_outermost:
            self._look_for_changes()
            if self.precision.param is not None:
                args, kwargs = cast_floating((args, kwargs), self.precision.param)
        self._make_room(unit)
        if unit.index == 0:
            self.ledger.pass_begins(expects_backward=torch.is_grad_enabled())
        try:
            self._execute(self.policy.forward_enter(unit.index))
            call = Call(self, unit, self.generation)
            aliases = make_aliases(self._anchor, call, unit.trainable_now())
            unit.shadow(aliases)
            try:
                outputs = inner(*args, **kwargs)
            finally:
                unit.unshadow()
            if aliases is not unit.views:
                _refuse_writes(unit, aliases)
        except BaseException as error:
            if self._backward_tasks:  # recomputation, which ends early by raising
                self._execute(self.policy.forward_exit(unit.index, expects_backward=False))
            else:
                self.abort()
                if is_outermost and isinstance(error, Exception):
                    self.monitor.failed_here(error, "forward", unit.name)
            raise
        if is_outermost and self.precision.output is not None:
            outputs = cast_floating(outputs, self.precision.output)
        outputs = _clone_escaping(outputs, unit)
        expects_backward = self._leave_forward(call, aliases, outputs, (args, kwargs))
        if is_outermost and not expects_backward:
            self.let_sends_finish()
        return outputs

    def _leave_forward(
        self, call: Call, aliases: list[torch.Tensor], outputs: Any, inputs: tuple[Any, Any]
    ) -> bool:
        """Close a unit's forward window; returns whether a backward may follow."""
        expects_backward = torch.is_grad_enabled() and watch_outputs(
            outputs, inputs, BackwardHook(call, aliases)
        )
        if expects_backward and not self._backward_tasks:  # what is computed again has none
            call.expect_backward()
        index = call.unit.index
        self._execute(self.policy.forward_exit(index, expects_backward=expects_backward))
        return expects_backward

    def _look_for_changes(self) -> None:
        """Notice parameters that the user wrote to, and refuse those that were replaced.

        Writes in place count up a tensor's version; the optimizer's own were noticed already.
        """
        changed = [u.index for u in self.units if u.parameters and u.was_written()]
        if changed:
            self.let_sends_finish()
            self.values_changed(changed)

    def _recover_from_backward(self) -> None:
        """Start afresh after a backward that raised before its end, if all ranks' did."""
        self.abort()
        if self._reporting is not None:
            self._reporting.join()
            self._reporting = None
        if self.monitor.broken is not None:
            raise self.monitor.broken

    def _make_room(self, unit: ShardedUnit) -> None:
        """Give a unit a slot of its own where another that is open now holds the shared one."""
        if self.policy.blocking_unit(unit.index) is None or self._open_calls[unit.index]:
            return
        self._finish_gather(unit)
        memory = self.buffers.allocate("parameter_slots", unit.layout.gathered_bytes, torch.uint8)
        self.slots.append(memory)
        self.lanes.add_slot()
        unit.bind_slot(len(self.slots) - 1, memory, self.transport)
        self.policy.move(unit.index, unit.slot)

    # Backward

    def backward_begins(self, call: Call, aliases: list[torch.Tensor]) -> None:
        """Gather the unit of a call whose outputs are about to receive gradients.

        Lane: compute. Waits: for the unit's gather.
        """
        unit = call.unit
        opened = self._open_calls[unit.index]
        if call in opened:
            return
        if call.generation != self.generation:
            raise LifecycleError(
                f"backward reached unit {unit.name!r} after an optimizer step changed its weights "
                "since the forward. Call backward before optimizer.step(), or run the forward "
                "again."
            )
        if torch.is_grad_enabled() and unit.gathered is not Gathered.STEP:
            raise LifecycleError(
                f"create_graph=True reached unit {unit.name!r}, whose weights {self.strategy.name} "
                "lets go before the second backward would use them. A gradient penalty works "
                "where weights stay gathered through the step: under 'ddp' and 'zero1'."
            )
        self._note_backward()
        self._last_backward_unit = unit.name
        is_first = not opened
        opened.append(call)
        if is_first:
            self._leave(self.policy.finished_before(unit.index))
            self.reducer.acquire(unit)
            self._execute(self.policy.backward_enter(unit.index))
        unit.shadow(aliases)

    def gradients_ready(
        self, call: Call, positions: tuple[int, ...], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Take all gradients of one call of a unit.

        Lane: compute. Signals: the unit's gradient, and the release of its slot.
        """
        unit = call.unit
        opened = self._open_calls[unit.index]
        if call not in opened:
            if not self.policy.is_held(unit.index):
                raise LifecycleError(
                    f"backward reached the parameters of unit {unit.name!r} without passing "
                    "through its outputs, so its weights were not gathered. Return every tensor "
                    "the loss uses (auxiliary losses too) from the unit's forward."
                )
            self.backward_begins(call, list(unit.views))
        if torch.is_grad_enabled():
            raise LifecycleError(
                "create_graph=True is not supported for gradients of parameters: they are reduced "
                "in place. Ask torch.autograd.grad for gradients of inputs only."
            )
        assert unit.gradient is not None, f"unit {unit.name} has a node but no gradient"
        self.reducer.collect(unit.gradient, positions, gradients)
        opened.remove(call)
        call.settle()
        if not opened:
            self._leave(self.policy.finished_inside(unit.index))
            unit.unshadow()
            is_last_call = unit.num_outstanding_calls == 0
            self._execute(self.policy.backward_exit(unit.index, is_last_call=is_last_call))

    def _leave(self, finished: Sequence[int]) -> None:
        """End the backward of units whose parameters get no gradient on this rank.

        Other ranks may have some for them, and what is reduced, and when, must not depend on that.
        """
        for index in finished:
            unit, opened = self.units[index], self._open_calls[index]
            for call in opened:
                call.settle()
            opened.clear()
            unit.unshadow()
            is_last_call = unit.num_outstanding_calls == 0
            self._execute(self.policy.backward_exit(index, is_last_call=is_last_call))

    def _note_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._backward_tasks:
            self._backward_tasks.append(task)
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(_BackwardEnd(self))

    def backward_broke(self) -> None:
        """A backward raised before its end: tell the other ranks, while the exception travels."""
        if self._backward_tasks and self._reporting is None:
            error = RuntimeError("see that rank's own output")
            self._reporting = threading.Thread(
                target=self.monitor.failed_here,
                args=(error, "backward", self._last_backward_unit),
                daemon=True,
            )
            self._reporting.start()

    def backward_end_broke(self, error: Exception) -> None:
        """A gradient hook raised: forget this backward, and tell the other ranks."""
        self.abort()
        self.monitor.failed_here(error, "backward", self._last_backward_unit)

    def backward_ends(self) -> None:
        """Settle what the hooks left open. Waits: for all reductions of this backward."""
        self._backward_tasks.pop()
        if self._backward_tasks:
            return  # a backward inside a backward, as re-entrant checkpointing runs them
        self._leave(self.policy.finished_before(None))
        for opened in self._open_calls.values():
            opened.clear()
        for unit in self.units:
            unit.unshadow()
        is_last = self.policy.is_last_micro_batch
        self._execute(self.policy.backward_end())
        self.reducer.finish(is_last=is_last)
        self.let_sends_finish()
        self.ledger.backward_ended(is_last=is_last)

    # Optimizer

    def before_step(self) -> None:
        """Refuse a step on partial gradients, and let sends of the shards finish."""
        for unit in self.units:
            if unit.is_unsharded_by_user:
                raise LifecycleError(
                    f"optimizer.step() came inside sw.unsharded(), where unit {unit.name!r} has "
                    "full parameters and no gradients; step outside it"
                )
        self.reducer.check_complete()
        self.let_sends_finish()

    def let_sends_finish(self) -> None:
        """Wait until no peer is still being sent what the shards hold.

        Passes end with this, since the user may write to the shards as soon as one has ended.
        """
        self.lanes.step_waits_for_gathers()
        for unit in self.units:
            with self.waiting("all_gather", unit.name):
                unit.gather.release()
                unit.gather_over_replicas.release()

    def after_step(self, changed: Sequence[int]) -> None:
        """Forget gathered values of the units an optimizer, or the user, changed."""
        self.values_changed(changed)
        self.ledger.step_ended()

    def values_changed(self, changed: Sequence[int]) -> None:
        """Forget gathered values of units whose masters the user changed."""
        self.generation += 1
        for unit in self.units:
            unit.num_outstanding_calls = 0
        self._execute(self.policy.step(changed))
        for index in changed:
            self.units[index].is_stale = True
            self.units[index].was_written()
        self.lanes.compute_stepped()
        self.ledger.values_changed()

    def require_unsharded(self, module: nn.Module, what: str) -> None:
        """Raise unless a module's own parameters are full."""
        owned = {id(p) for p in module._parameters.values() if p is not None}
        for unit in self.units:
            if not unit.is_unsharded_by_user and any(id(p) in owned for p in unit.parameters):
                raise LifecycleError(
                    f"{what} of {type(module).__name__} needs full parameters, but those of unit "
                    f"{unit.name!r} are sharded over the ranks. On every rank, call it inside "
                    "`with sw.unsharded(model):` (with writeback=True to load)."
                )

    def require_idle(self, what: str) -> None:
        """Raise where a pass is under way, or the user has full parameters.

        Args:
            what: What was called, for the message.
        """
        if self.policy.is_any_open() or any(u.is_unsharded_by_user for u in self.units):
            raise LifecycleError(
                f"{what} must come outside forward, backward and sw.unsharded() blocks; call it "
                "between passes"
            )

    def abort(self) -> None:
        """Close every window after an exception, so that the next forward starts afresh."""
        self.policy.abort()
        self._backward_tasks.clear()
        for opened in self._open_calls.values():
            opened.clear()
        for unit in self.units:
            unit.unshadow()
        self.reducer.abort()

    # Actions

    def _execute(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if action.op is not Op.STEP:
                self._carry_out[action.op](self._by_name[action.unit], action)

    def _unshard(self, unit: ShardedUnit, action: Action) -> None:
        """Start a gather.

        Lane: gather, or replicate. Waits: for the slot's release and the step.
        """
        if not unit.parameters:
            return
        lanes = self.lanes
        if action.axis == REPLICATE:
            with (
                lanes.replicate(),
                self.waiting("all_gather over replicas", unit.name, is_timed=False),
            ):
                lanes.replicate_waits_for_step()
                unit.refresh()
                unit.gather_over_replicas.start()
                lanes.replicas_gathered(unit.index)
            unit.is_gathering_over_replicas = True
            self.ledger.count("all_gather", REPLICATE, unit, unit.gather_over_replicas)
            self.monitor.issued("all_gather over replicas", unit.name)
            return
        busy = self._gathering_in_slot.get(unit.slot)
        if busy is not None:
            self._finish_gather(busy)
        if unit.is_gathering_over_replicas:
            with self.waiting("all_gather over replicas", unit.name):
                unit.gather_over_replicas.finish()
            unit.is_gathering_over_replicas = False
        with lanes.gather(), self.waiting("all_gather", unit.name, is_timed=False):
            lanes.gather_waits_for_release(unit.slot)
            lanes.gather_waits_for_step()
            lanes.gather_waits_for_replicas(unit.index)
            unit.refresh()
            unit.gather.start()
            lanes.gather_finished(unit.index)
        unit.is_gathering = True
        self._gathering_in_slot[unit.slot] = unit
        self.ledger.count("all_gather", "shard", unit, unit.gather)
        self.monitor.issued("all_gather", unit.name)

    def _await_parameters(self, unit: ShardedUnit, _: Action) -> None:
        self._finish_gather(unit)
        self.lanes.compute_waits_for_gather(unit.index)

    def _reshard(self, unit: ShardedUnit, _: Action) -> None:
        self._finish_gather(unit)
        if not self.policy.is_open(unit.index):
            self._open_calls[unit.index].clear()
            unit.unshadow()
            if self._poisons_released and unit.gathered is not Gathered.STEP:
                self.slots[unit.slot].fill_(0xFF)  # NaN in every floating-point format
        if unit.slot >= 0:
            self.lanes.compute_released_slot(unit.slot)

    def _reduce(self, unit: ShardedUnit, _: Action) -> None:
        self.reducer.start_reduce(unit, is_last=self.policy.is_last_micro_batch)

    def _finish_gather(self, unit: ShardedUnit) -> None:
        if unit.is_gathering:
            with self.waiting("all_gather", unit.name):
                unit.gather.finish()
            unit.is_gathering = False
            self._gathering_in_slot.pop(unit.slot, None)


def _refuse_writes(unit: ShardedUnit, aliases: Sequence[torch.Tensor]) -> None:
    """Raise where a forward wrote into a parameter: what it wrote lies in a slot, and is lost."""
    for owned, alias in zip(unit.modules.owned, aliases, strict=True):
        if alias._version:
            raise LifecycleError(
                f"parameter {owned.name!r} was changed in place inside the forward of unit "
                f"{unit.name!r}, where the change would be lost. Change it outside forward, inside "
                "`with sw.unsharded(model, writeback=True):`, or make it a buffer."
            )


def _clone_escaping(outputs: Any, unit: ShardedUnit) -> Any:
    """Copy outputs that are views of the slot: its content changes after the forward."""
    pointer = unit.slot_storage_ptr
    if isinstance(outputs, torch.Tensor):  # the common case, without walking a structure
        escapes = pointer and outputs.untyped_storage().data_ptr() == pointer
        return outputs.clone() if escapes else outputs
    return map_tensors(
        outputs,
        lambda t: t.clone() if pointer and t.untyped_storage().data_ptr() == pointer else t,
    )
