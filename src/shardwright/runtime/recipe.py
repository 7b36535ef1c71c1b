"""How a tensor came by its values, kept as the calls that made it, and run again on demand.

Built by `recorder`, which watches a constructor. A `Memory` is what one storage holds; each
`Write` is one change of it, pointing at the change before, so that a version of a memory *is* its
last write, and what nothing points at any more is collected. A `Call` is one torch operation whose
tensor arguments are `TensorRef`: a view of a version of a memory, or of a `Constant`.

    memory of weight:  empty <- uniform_ <- select.fill_     each arrow is `Write.before`
                                 ^ writes over everything: what came before is of no use

`replay` takes the calls that one tensor depends on, in their order, and runs them on the CPU. Each
random call has a seed of its own, so that a parameter's values depend neither on which others are
replayed nor on the order. Memory that nothing wrote to reads as NaN, never as chance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.core.errors import LifecycleError, SpecError

__all__ = [
    "Call",
    "Constant",
    "Memory",
    "Randomness",
    "TensorRef",
    "Write",
    "digest",
    "replay",
]

_CPU = torch.device("cpu")


class Memory:
    """What one storage holds, over time.

    Attributes:
        num_bytes: Size of the storage, in bytes.
        last: Its newest change; None where nothing was written.
        is_deferred: Whether the storage was dropped, so that only replaying gives its values.
    """

    __slots__ = ("is_deferred", "last", "num_bytes")

    def __init__(self, num_bytes: int, *, is_deferred: bool) -> None:
        self.num_bytes = num_bytes
        self.last: Write | None = None
        self.is_deferred = is_deferred

    def written(self, call: Call, *, is_whole: bool) -> None:
        """Add a change.

        Args:
            call: What made it.
            is_whole: It replaced everything and read nothing of what was there.
        """
        self.last = Write(call=call, before=None if is_whole else self.last)


class Constant:
    """Values from outside the recording, kept by reference.

    Args:
        tensor: Any tensor; its storage is what is kept, and its version counter is watched.
    """

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.keep(tensor)

    def keep(self, tensor: torch.Tensor) -> None:
        """Hold on to a tensor's storage, as it is now."""
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version

    def keep_copy(self) -> None:
        """Hold a copy from now on: the storage is about to be written to."""
        copy = self.tensor.untyped_storage().clone()
        self.keep(_view(copy, self.tensor.dtype, 0, (0,), (1,)))

    def storage(self) -> torch.UntypedStorage:
        """The values.

        Raises:
            SpecError: They never had any.
            LifecycleError: They were changed since they were recorded.
        """
        if self.tensor.is_meta:
            raise SpecError(
                "a parameter was computed from a tensor on the meta device, which has no values; "
                "make both inside one sw.meta_init()"
            )
        if self.version is not None and self.tensor._version != self.version:
            raise LifecycleError(
                f"a tensor of shape {tuple(self.tensor.shape)} from which a parameter is computed "
                "was changed after sw.meta_init() recorded it; leave it alone until sw.shard(), or "
                "hand a clone to the constructor"
            )
        return self.tensor.untyped_storage()


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """One change of a memory.

    Attributes:
        call: What made it.
        before: The change before it that still matters.
    """

    call: Call
    before: Write | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorRef:
    """A tensor argument: a view of a version of a memory, or of a constant.

    Attributes:
        source: Whose values.
        write: The version; None for a constant, or where no earlier value is read.
        dtype: Element type.
        size: Shape.
        stride: Strides, in elements.
        offset: First element in the storage, in elements.
        is_conj: Whether values are read conjugated.
        is_neg: Whether values are read negated.
    """

    source: Memory | Constant
    write: Write | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool = False
    is_neg: bool = False

    @classmethod
    def of(
        cls, tensor: torch.Tensor, source: Memory | Constant, write: Write | None = None
    ) -> TensorRef:
        """Describe how a tensor lies in its storage."""
        return cls(
            source=source,
            write=write,
            dtype=tensor.dtype,
            size=tuple(tensor.size()),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
            is_conj=tensor.is_conj(),
            is_neg=tensor.is_neg(),
        )

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor over a storage that holds its source's values."""
        tensor = _view(storage, self.dtype, self.offset, self.size, self.stride)
        if self.is_conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self.is_neg else tensor

    def describe(self, number: int) -> str:
        """Say in text where its source has a number, for comparison between ranks."""
        flags = f"{self.is_conj}{self.is_neg}"
        return f"#{number}:{self.dtype}{self.size}{self.stride}{self.offset}{flags}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Randomness:
    """Where a random call draws from.

    Attributes:
        seed: Seed of torch's default CPU generator during the call.
        state: State of the generator that was passed, instead.
    """

    seed: int = 0
    state: torch.Tensor | None = None

    def run(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function, leaving the default generator as it was."""
        if self.state is not None:
            generator = torch.Generator()
            generator.set_state(self.state)
            return function(*args, **{**kwargs, "generator": generator})
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(self.seed)
        try:
            return function(*args, **kwargs)
        finally:
            torch.default_generator.set_state(before)

    def describe(self) -> str:
        """Say in text what is drawn, for comparison between ranks."""
        if self.state is None:
            return f"seed {self.seed}"
        return hashlib.sha256(self.state.numpy().tobytes()).hexdigest()


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """One torch operation.

    Attributes:
        order: Later calls have larger ones, across recordings.
        function: The operation.
        args: Its positional arguments, tensors as `TensorRef`.
        kwargs: Its keyword arguments, likewise.
        randomness: What it draws, if anything.
        created: ``(index among the returned leaves, what it holds)`` of each new memory.
        overwritten: The memory that it replaces without reading, if any.
    """

    order: tuple[int, int]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    randomness: Randomness | None = None
    created: list[tuple[int, TensorRef]] = field(default_factory=list)
    overwritten: Memory | None = None

    def refs(self) -> Iterator[TensorRef]:
        """Its tensor arguments."""
        for leaf in tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, TensorRef):
                yield leaf

    def sources(self) -> Iterator[Memory | Constant]:
        """Everything it reads, writes or makes."""
        for ref in self.refs():
            yield ref.source
        for _, ref in self.created:
            yield ref.source


def replay(refs: Sequence[TensorRef]) -> list[torch.Tensor]:
    """Run the calls that some tensors depend on.

    Holds, at any moment, only what later calls still need.

    Args:
        refs: Which tensors.

    Returns:
        One CPU tensor each, with fresh storage unless it is a constant's; aliases where the
        originals were.
    """
    calls = _needed(refs)
    last_use: dict[Memory | Constant, int] = {}
    for index, call in enumerate(calls):
        last_use.update(dict.fromkeys(call.sources(), index))
    last_use.update(dict.fromkeys((ref.source for ref in refs), len(calls)))
    storages: dict[Memory | Constant, torch.UntypedStorage] = {}
    with torch.no_grad():
        for index, call in enumerate(calls):
            _run(call, storages)
            for source in set(call.sources()):
                if last_use[source] == index:
                    storages.pop(source, None)
        return [ref.view(_storage_of(ref, storages)) for ref in refs]


def digest(ref: TensorRef) -> str:
    """Sum up everything a tensor's values depend on, so that ranks can compare."""
    numbers: dict[Memory | Constant, int] = {}
    text = hashlib.sha256()

    def number(source: Memory | Constant) -> int:
        if source not in numbers:
            numbers[source] = len(numbers)
            if isinstance(source, Constant):
                storage = source.storage()
                flat = _view(storage, torch.uint8, 0, (storage.nbytes(),), (1,))
                text.update(flat.cpu().numpy().tobytes())
        return numbers[source]

    def described(leaf: Any) -> Any:
        return leaf.describe(number(leaf.source)) if isinstance(leaf, TensorRef) else str(leaf)

    for call in _needed([ref]):
        arguments = tree_map(described, (call.args, _without_generator(call)))
        made = [f"{index}={made.describe(number(made.source))}" for index, made in call.created]
        drawn = "" if call.randomness is None else call.randomness.describe()
        text.update(f"{call.function}{arguments}{made}{drawn}\n".encode())
    text.update(ref.describe(number(ref.source)).encode())
    return text.hexdigest()


def _without_generator(call: Call) -> dict[str, Any]:
    return {k: v for k, v in call.kwargs.items() if k != "generator"}


def _needed(refs: Sequence[TensorRef]) -> list[Call]:
    """The calls that tensors depend on, in order."""
    calls: dict[int, Call] = {}
    seen: set[int] = set()
    stack = [ref.write for ref in refs]
    while stack:
        write = stack.pop()
        while write is not None and id(write) not in seen:
            seen.add(id(write))
            if id(write.call) not in calls:
                calls[id(write.call)] = write.call
                stack.extend(ref.write for ref in write.call.refs())
            write = write.before
    return sorted(calls.values(), key=lambda call: call.order)


def _run(call: Call, storages: dict[Memory | Constant, torch.UntypedStorage]) -> None:
    """Run one call on what the storages hold, and add what it makes."""

    def given(leaf: Any) -> Any:
        if not isinstance(leaf, TensorRef):
            return leaf
        return leaf.view(_storage_of(leaf, storages, is_read=leaf.source is not call.overwritten))

    args, kwargs = tree_map(given, (call.args, call.kwargs))
    if call.randomness is None:
        made = call.function(*args, **kwargs)
    else:
        made = call.randomness.run(call.function, args, kwargs)
    leaves = tree_leaves(made)
    for index, ref in call.created:
        storages[ref.source] = _laid_out(leaves[index], ref)


def _laid_out(tensor: torch.Tensor, ref: TensorRef) -> torch.UntypedStorage:
    """The storage of a result, rearranged where it lies otherwise than was recorded."""
    assert isinstance(ref.source, Memory), "calls make memories, not constants"
    lies_alike = tensor.stride() == ref.stride and tensor.storage_offset() == ref.offset
    storage = tensor.untyped_storage()
    if lies_alike and storage.nbytes() >= ref.source.num_bytes and not tensor.is_conj():
        return storage
    storage = _fresh(ref.source.num_bytes)
    ref.view(storage).copy_(tensor)
    return storage


def _storage_of(
    ref: TensorRef, storages: dict[Memory | Constant, torch.UntypedStorage], *, is_read: bool = True
) -> torch.UntypedStorage:
    source = ref.source
    if isinstance(source, Constant):
        return source.storage()
    found = storages.get(source)
    if found is None:
        found = storages[source] = _fresh(source.num_bytes)
        if is_read:
            _fill_with_nan(found, ref.dtype)
    return found


def _fresh(num_bytes: int) -> torch.UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8, device=_CPU).untyped_storage()


def _fill_with_nan(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """Make memory that nothing wrote to recognisable: NaN, or zero for integers."""
    count = storage.nbytes() // dtype.itemsize
    has_nan = dtype.is_floating_point or dtype.is_complex
    _view(storage, dtype, 0, (count,), (1,)).fill_(float("nan") if has_nan else 0)


def _view(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
