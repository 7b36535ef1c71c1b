"""What a launched rank is given and gives back, as bytes.

Plain pickle would send a tensor's whole storage, and multiprocessing's would share its memory with
a process about to end. Here tensors travel as copies of exactly their elements. Only processes
that one `launch` started exchange these bytes.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Packed", "pack", "unpack"]


class Packed(bytes):
    """Bytes of an object, and whether another process needs this one's `__main__` to read them."""

    needs_main: bool


class _RankPickler(pickle.Pickler):
    """Pickles tensors by value and notices references to `__main__`."""

    needs_main = False

    def reducer_override(self, obj: Any) -> Any:
        """Say how to pickle an object; called for each that isn't a built-in container or number.

        Args:
            obj: Any object.

        Returns:
            A function and its arguments that make a copy, or NotImplemented for pickle's own way.
        """
        if getattr(obj, "__module__", None) == "__main__":
            self.needs_main = True
        return _reduce_tensor(obj) if isinstance(obj, Tensor) else NotImplemented


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or tensor.is_meta or tensor.is_quantized:
        raise TypeError(
            f"a rank exchanges dense tensors; found a {type(tensor).__name__} with layout "
            f"{tensor.layout} on {tensor.device}; convert it first, e.g. with to_dense(), "
            f"full_tensor() or tolist()"
        )
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    elements = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    is_parameter = isinstance(tensor, nn.Parameter)
    return _restore_tensor, (
        tensor.dtype,
        tuple(tensor.shape),
        elements,
        is_parameter,
        tensor.requires_grad and tensor.is_leaf,
    )


def _restore_tensor(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    elements: bytes,
    is_parameter: bool,
    requires_grad: bool,
) -> Tensor:
    if elements:
        tensor = torch.frombuffer(bytearray(elements), dtype=dtype).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    if is_parameter:
        return nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def pack(obj: Any) -> Packed:
    """Turn an object into bytes.

    Args:
        obj: Anything pickle takes. Tensors must be dense; those on another device come back on
            the CPU, and what autograd recorded doesn't travel.

    Returns:
        The bytes.

    Raises:
        TypeError: Containers are nested deeper than pickle can follow.
        Exception: Whatever else pickling raises, e.g. for a lambda.
    """
    buffer = io.BytesIO()
    pickler = _RankPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(obj)
    except RecursionError:
        raise TypeError("containers in it are nested too deeply for pickle") from None
    packed = Packed(buffer.getvalue())
    packed.needs_main = pickler.needs_main
    return packed


def unpack(data: bytes) -> Any:
    """Make the object again from what `pack` returned.

    Args:
        data: The bytes, from a process this one started or was started by.

    Returns:
        A copy; tensors own their memory, on the CPU.
    """
    return pickle.loads(data)
