"""Records what happens to tensors while a model is built, deferring what touches its parameters.

Used by `deferred`, which says what this is for; `recipe` holds what is recorded. The recording is
kept by the storages themselves: a storage's `_Tag` says which memory of the recipe it stands for.
So views, detached tensors and copies are recognised with no table of tensors, and what no living
tensor needs is freed.

    constructor ──> registration hook: real parameter -> meta, its storage's tag goes along
        │
        └─> `Recorder.__torch_dispatch__`
              no deferred argument      run it; record how its results came about
              a deferred argument       run it on the meta device for shapes; record it
              Python wants a number     replay what it depends on, and answer

[Note: deferred tensors look real] Initialisers of torch skip tensors on the meta device, and some
constructors ask for a weight's device to make a buffer there. While recording, `is_meta` and
`device` of deferred tensors therefore answer as a CPU tensor would.

[Note: seeds] Random operations draw from generators of their own, seeded by a number drawn from
torch's default generator and by how many came before. It is drawn anew when that generator has
changed, as by `torch.manual_seed`. The default generator itself moves by no more than that draw.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from shardwright.runtime.recipe import Call, Constant, Memory, Randomness, TensorRef, replay

__all__ = ["RECORDED", "Disguise", "Recorded", "Recorder", "adopt", "is_recording", "tag_of"]

_META = torch.device("meta")
_CPU = torch.device("cpu")
_TAG = "_shardwright_tag"
_CONSTANT = "_shardwright_constant"

RECORDED = "_shardwright_recorded"
"""Attribute of parameters that holds their `Recorded`."""


_UNWRITTEN = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Operations whose results hold nothing yet."""

_WHOLE_WRITES = frozenset(
    "bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_"
    " zero_".split()
)
"""Operations that replace their first argument's values and read none of them."""

_VALUE_READS = frozenset({"__array__", "numpy", "tolist"})
_EXPOSURES = frozenset({"__array__", "__dlpack__", "data_ptr", "numpy"})
"""Methods after which a tensor's memory may be written to behind torch's back."""

_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_DEVICE = torch.Tensor.device.__get__
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, eq=False)
class _Tag:
    """What a storage stands for.

    Attributes:
        memory: The memory of the recipe.
        recorder: Who recorded it; what happened to a real storage since then is unknown.
        twin: For the real storage of a deferred memory, the meta storage that took its place.
    """

    memory: Memory
    recorder: object
    twin: torch.UntypedStorage | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """Kept on a parameter when recording ends.

    Attributes:
        ref: Its values.
        version: Its version counter, to notice changes that weren't recorded.
    """

    ref: TensorRef
    version: int


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized
    return tensor.untyped_storage() if is_plain else None


def tag_of(tensor: torch.Tensor) -> _Tag | None:
    """What a tensor's storage stands for; None where nothing was recorded of it."""
    storage = _storage(tensor)
    return None if storage is None else getattr(storage, _TAG, None)


def _is_deferred(tensor: torch.Tensor) -> bool:
    tag = tag_of(tensor)
    return tag is not None and tag.memory.is_deferred


def adopt(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give a parameter other values, and with them shape, dtype and device, keeping its identity.

    Args:
        parameter: Changed in place.
        values: What it holds from now on; shared, not copied.
    """
    if parameter.device.type == values.device.type:
        parameter.data = values
        return
    # What torch.utils.swap_tensors does, which refuses objects with weak references, as LSTM keeps
    # to its weights. Those refer to the object, which stays.
    other = nn.Parameter(values, requires_grad=parameter.requires_grad)
    torch._C._swap_tensor_impl(parameter, other)


def is_recording() -> bool:
    """Whether this thread is inside a recording."""
    return any(isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack())


class Disguise(TorchFunctionMode):
    """Lets deferred tensors look like CPU tensors, and notices access past torch.

    See [Note: deferred tensors look real].
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and not self._recorder.is_quiet:
            tensor, name = args[0], getattr(func, "__name__", "")
            if func in (_IS_META, _DEVICE) and _is_deferred(tensor):
                return False if func == _IS_META else _CPU
            if name in _VALUE_READS and _is_deferred(tensor):
                return func(self._recorder.values([tensor])[0], *args[1:], **kwargs)
            if name in _EXPOSURES:
                _forget_origin(tensor)
            if func == _SET_DATA and _is_deferred(tensor) and not _is_deferred(args[1]):
                return func(tensor, self._recorder.deferred_alias(args[1]))
        return func(*args, **kwargs)


def _forget_origin(tensor: torch.Tensor) -> None:
    """Treat a real tensor as one from outside: its memory may change unseen from now on."""
    storage = _storage(tensor)
    if storage is not None and not _is_deferred(tensor) and hasattr(storage, _TAG):
        delattr(storage, _TAG)


class Recorder(TorchDispatchMode):
    """Records one `meta_init` block. Its hooks act only where it is the active mode."""

    def __init__(self) -> None:
        super().__init__()
        self.is_quiet = False
        self._started_ns = time.monotonic_ns()
        self._numbers = itertools.count()
        self._modules: dict[int, nn.Module] = {}
        self._touched: dict[int, nn.Parameter] = {}
        self._seeds = _Seeds()

    # Hooks of torch.nn

    def parameter_registered(self, module: nn.Module, _: str, parameter: Any) -> None:
        """Move a parameter to the meta device when a module takes it."""
        if self._is_active():
            self._modules[id(module)] = module
            if parameter is not None:
                with self._quietly():
                    self._defer(parameter)

    def buffer_registered(self, _: nn.Module, __: str, buffer: Any) -> torch.Tensor | None:
        """Compute a buffer that was derived from a parameter."""
        if buffer is None or not self._is_active() or not _is_deferred(buffer):
            return None
        with self._quietly():
            value = self.values([buffer])[0]
            return value.as_subclass(type(buffer)) if type(buffer) is not torch.Tensor else value

    def module_registered(self, module: nn.Module, _: str, child: Any) -> None:
        """Remember modules, to find the parameters of copied ones."""
        if self._is_active():
            self._modules[id(module)] = module
            if child is not None:
                self._modules[id(child)] = child

    def ends(self) -> None:
        """Leave with every parameter what is needed to replay it."""
        parameters, seen = dict(self._touched), set()
        for root in self._modules.values():
            for module in root.modules():
                if id(module) not in seen:
                    seen.add(id(module))
                    found = (p for p in module._parameters.values() if p is not None)
                    parameters.update((id(p), p) for p in found)
        for parameter in parameters.values():
            tag = tag_of(parameter)
            if tag is not None and tag.memory.is_deferred and parameter.is_meta:
                ref = TensorRef.of(parameter, tag.memory, tag.memory.last)
                parameter.__dict__[RECORDED] = Recorded(ref, parameter._version)
        self._modules.clear()
        self._touched.clear()

    def _is_active(self) -> bool:
        return any(mode is self for mode in _get_current_dispatch_mode_stack())

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Neither record nor disguise what is done meanwhile."""
        before, self.is_quiet = self.is_quiet, True
        try:
            yield
        finally:
            self.is_quiet = before

    def _defer(self, parameter: nn.Parameter) -> None:
        """Drop a parameter's storage, if how its values came about is known."""
        tag = tag_of(parameter)
        if tag is None or parameter.is_meta or type(parameter) is not nn.Parameter:
            return
        if tag.recorder is not self:
            return
        storage = parameter.untyped_storage()
        tag = tag if tag.twin is not None else self._with_twin(tag, storage)
        try:
            adopt(parameter, _stand_in(parameter, tag))
        except RuntimeError:
            return  # something else holds on to it: it stays real, and is sharded as such
        self._drop(tag, storage)

    def deferred_alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A deferred tensor that stands for a real one, whose own storage counts no more."""
        tag = tag_of(tensor)
        if tag is None or tag.recorder is not self:
            tensor = tensor.detach().clone()  # recorded: its values come from outside
            tag = tag_of(tensor)
        assert tag is not None, "what is made while recording has a tag"
        with self._quietly():
            storage = tensor.untyped_storage()
            tag = self._with_twin(tag, storage)
            self._drop(tag, storage)
            return _stand_in(tensor, tag)

    def _with_twin(self, tag: _Tag, storage: torch.UntypedStorage) -> _Tag:
        """A tag with a meta storage in the place of a real one."""
        return _Tag(tag.memory, self, torch.UntypedStorage(storage.nbytes(), device=_META))

    def _drop(self, tag: _Tag, storage: torch.UntypedStorage) -> None:
        """Let replaying be the only way to a storage's values from now on."""
        tag.memory.is_deferred = True
        setattr(storage, _TAG, tag)
        setattr(tag.twin, _TAG, _Tag(tag.memory, self))

    # Operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_quiet or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        with self._quietly():
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation, really or on the meta device, and record it."""
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        written = [] if torch.Tag.inplace_view in func.tags else _written(func, args, kwargs)
        deferred = [t for t in given if _is_deferred(t)]
        for tensor in written:
            _keep_constant(tensor)
        randomness = self._randomness(func, kwargs)
        if not deferred:
            result = _run(func, args, kwargs, randomness)
        elif _must_run(func, deferred, written):
            result = self._run_on_values(func, args, kwargs, randomness)
        else:
            try:
                result = self._run_on_meta(func, args, kwargs)
            except NotImplementedError:
                result = self._run_on_values(func, args, kwargs, randomness)
            else:
                if randomness is not None and randomness.state is not None:
                    _advance(func, args, kwargs)
        self._record(func, args, kwargs, randomness, given, written, result)
        return result

    def values(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Compute deferred tensors. The results are copies: writing to them changes nothing."""
        refs = []
        for tensor in tensors:
            tag = tag_of(tensor)
            assert tag is not None, "only deferred tensors are computed"
            refs.append(TensorRef.of(tensor, tag.memory, tag.memory.last))
        with self._quietly():
            return replay(refs)

    def _run_on_meta(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Find out the shapes of an operation's results."""
        stand_ins: dict[int, torch.Tensor] = {}
        originals: dict[int, torch.Tensor] = {}

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta:
                return tensor
            if id(tensor) not in stand_ins:
                made = stand_ins[id(tensor)] = _stand_in(tensor, tag_of(tensor))
                originals[id(made)] = tensor
            return stand_ins[id(tensor)]

        meta_args, meta_kwargs = tree_map_only(torch.Tensor, stand_in, (args, kwargs))
        if "device" in meta_kwargs:
            meta_kwargs["device"] = _META
        if "generator" in meta_kwargs:
            meta_kwargs["generator"] = None
        result = func(*meta_args, **meta_kwargs)
        return tree_map_only(torch.Tensor, lambda t: originals.get(id(t), t), result)

    def _run_on_values(
        self, func: Any, args: Any, kwargs: dict[str, Any], randomness: Randomness | None
    ) -> Any:
        """Run an operation on computed copies of its deferred arguments."""
        deferred = {
            id(t): t
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor) and _is_deferred(t)
        }
        values = dict(zip(deferred, self.values(list(deferred.values())), strict=True))
        originals = {id(value): deferred[key] for key, value in values.items()}
        real_args, real_kwargs = tree_map_only(
            torch.Tensor, lambda t: values.get(id(t), t), (args, kwargs)
        )
        if real_kwargs.get("device") == _META:
            real_kwargs["device"] = _CPU
        with torch.no_grad():
            result = _run(func, real_args, real_kwargs, randomness)
        return tree_map_only(torch.Tensor, lambda t: originals.get(id(t), t), result)

    def _randomness(self, func: Any, kwargs: dict[str, Any]) -> Randomness | None:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        generator = kwargs.get("generator")
        if generator is not None:
            is_cpu = generator.device == _CPU
            return Randomness(state=generator.get_state()) if is_cpu else self._seeds.draw()
        return self._seeds.draw()

    # Recording

    def _record(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        randomness: Randomness | None,
        given: list[torch.Tensor],
        written: list[torch.Tensor],
        result: Any,
    ) -> None:
        """Note which memories an operation made and which it changed."""
        known = {s._cdata for t in given if (s := _storage(t)) is not None}
        made: list[tuple[int, torch.Tensor]] = []
        for index, leaf in enumerate(tree_leaves(result)):
            storage = _storage(leaf) if isinstance(leaf, torch.Tensor) else None
            if storage is not None and storage._cdata not in known and not hasattr(storage, _TAG):
                known.add(storage._cdata)
                made.append((index, leaf))
        changed = {m: t for t in written if (m := self._memory(t)) is not None}
        if not made and not changed:
            return
        call = Call(
            order=(self._started_ns, next(self._numbers)),
            function=func,
            args=(),
            kwargs={},
            randomness=randomness,
        )
        name = func.overloadpacket.__name__
        if name not in _UNWRITTEN:
            overwritten = _overwritten(name, given, changed)
            call.overwritten = overwritten
            call.args, call.kwargs = self._as_refs(args, kwargs, overwritten)
        for memory, tensor in changed.items():
            storage = tensor.untyped_storage()
            memory.num_bytes = max(memory.num_bytes, storage.nbytes())
            memory.written(call, is_whole=memory is call.overwritten)
            if isinstance(tensor, nn.Parameter):
                self._touched[id(tensor)] = tensor
        for index, tensor in made:
            storage = tensor.untyped_storage()
            memory = Memory(storage.nbytes(), is_deferred=tensor.is_meta)
            setattr(storage, _TAG, _Tag(memory, self))
            if name not in _UNWRITTEN:
                call.created.append((index, TensorRef.of(tensor, memory)))
                memory.written(call, is_whole=True)

    def _as_refs(self, args: Any, kwargs: dict[str, Any], overwritten: Memory | None) -> Any:
        """Arguments with references in place of tensors, to run on the CPU."""

        def as_ref(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or _storage(leaf) is None:
                return _CPU if isinstance(leaf, torch.device) else leaf
            memory = self._memory(leaf)
            if memory is None:
                return TensorRef.of(leaf, _constant(leaf))
            return TensorRef.of(leaf, memory, None if memory is overwritten else memory.last)

        return tree_map(as_ref, (args, {k: v for k, v in kwargs.items() if k != "pin_memory"}))

    def _memory(self, tensor: torch.Tensor) -> Memory | None:
        """The memory a tensor views, None where its values come from outside this block."""
        tag = tag_of(tensor)
        if tag is None or not (tag.memory.is_deferred or tag.recorder is self):
            return None
        return tag.memory


class _Seeds:
    """Gives each random operation a seed. See [Note: seeds]."""

    def __init__(self) -> None:
        self._base = 0
        self._state: torch.Tensor | None = None
        self._count = 0

    def draw(self) -> Randomness:
        """The next operation's seed."""
        state = torch.default_generator.get_state()
        if self._state is None or not torch.equal(state, self._state):
            drawn = torch.empty((), dtype=torch.int64).random_(0, 2**32)
            self._base, self._count = int(drawn), 0
            self._state = torch.default_generator.get_state()
        self._count += 1
        return Randomness(seed=_mix(self._base + self._count * 0x9E3779B1))


def _mix(value: int) -> int:
    """Spread a number over 32 bits, one to one: torch's CPU generator uses no more of a seed."""
    value &= 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        value = (value ^ (value >> shift)) * factor & 0xFFFFFFFF
    return value


def _run(func: Any, args: Any, kwargs: dict[str, Any], randomness: Randomness | None) -> Any:
    """Run an operation for real. A generator that was passed is used, and moves."""
    if randomness is None or randomness.state is not None:
        return func(*args, **kwargs)
    return randomness.run(func, args, kwargs)


def _advance(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Move a generator that was passed as the operation would have, had it run."""

    def scratch(tensor: torch.Tensor) -> torch.Tensor:
        if not _is_deferred(tensor):
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=_CPU)

    scratch_args, scratch_kwargs = tree_map_only(torch.Tensor, scratch, (args, kwargs))
    with torch.no_grad():
        func(*scratch_args, **{k: v for k, v in scratch_kwargs.items() if k != "device"})


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensor arguments that an operation writes to, by its schema."""
    found: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            is_positional = position < len(args)
            found.append(args[position] if is_positional else kwargs.get(argument.name))
    return [t for t in tree_leaves(found) if isinstance(t, torch.Tensor)]


def _must_run(func: Any, deferred: list[torch.Tensor], written: list[torch.Tensor]) -> bool:
    """Whether an operation's result is needed now: Python or a real tensor takes it."""
    returns_tensors = any("Tensor" in str(r.type) for r in func._schema.returns)
    into_real = any(not _is_deferred(t) for t in written)
    return bool(deferred) and (into_real or not (returns_tensors or written))


def _stand_in(tensor: torch.Tensor, tag: _Tag | None) -> torch.Tensor:
    """A meta tensor that lies as a real one; in the twin of its storage where there is one."""
    if tag is not None and tag.twin is not None:
        return TensorRef.of(tensor, tag.memory).view(tag.twin)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)


def _overwritten(
    name: str, given: list[torch.Tensor], changed: dict[Memory, torch.Tensor]
) -> Memory | None:
    """The memory that an operation replaces as a whole and doesn't read, if any."""
    if name not in _WHOLE_WRITES or len(changed) != 1:
        return None
    ((memory, tensor),) = changed.items()
    storage = tensor.untyped_storage()
    is_dense = tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
    covers = is_dense and tensor.numel() * tensor.element_size() == storage.nbytes()
    uses = sum(1 for t in given if (tag := tag_of(t)) is not None and tag.memory is memory)
    return memory if covers and uses == 1 else None


def _constant(tensor: torch.Tensor) -> Constant:
    """Values from outside; one object per storage, so that a later write can find it."""
    storage = tensor.untyped_storage()
    known: weakref.ref[Constant] | None = getattr(storage, _CONSTANT, None)
    found = None if known is None else known()
    if found is None:
        found = Constant(tensor)
        setattr(storage, _CONSTANT, weakref.ref(found))
    return found


def _keep_constant(tensor: torch.Tensor) -> None:
    """Before a write to values from outside, copy them for the calls that read them earlier."""
    storage = _storage(tensor)
    known: weakref.ref[Constant] | None = getattr(storage, _CONSTANT, None)
    found = None if known is None else known()
    if found is not None:
        found.keep_copy()
        delattr(storage, _CONSTANT)
