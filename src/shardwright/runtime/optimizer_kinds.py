"""Which optimizers can't work on some rows of a parameter, told by their names.

Nothing is imported to find out: a class is recognised by its name, and where that says too little
by the package it comes from. Optimizers not known here are taken to be elementwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwright.core.errors import SpecError
from shardwright.core.layout import ParameterSpec

__all__ = ["Need", "need_of"]

_WHOLE_MODEL = "it looks at all parameters at once, and a rank sees only its shards"
_DENSE = "gradients of sharded parameters are dense"
_WHOLE_MATRIX = "it looks at whole matrices, and a rank may hold only some of their rows"
_WHOLE_TENSOR = "it scales by norms of whole parameters, and a rank may hold only some rows"
_QUANTISED = (
    "it decides by a parameter's size whether to quantise its state, and does so in blocks; on "
    "some of the rows it decides and rounds otherwise"
)

_NEVER = {
    _WHOLE_MODEL: """lbfgs prodigy sam dadaptadam dadaptadagrad dadaptsgd dadaptadan
        dadaptlion""".split(),
    _DENSE: ["sparseadam"],
}
_ONLY_WHOLE = {
    _WHOLE_MATRIX: """muon adamuon singledevicemuon muonwithauxadam singledevicemuonwithauxadam
        adafactor adafactorbigvision came shampoo scalableshampoo distributedshampoo soap kron
        psgdkron""".split(),
    _WHOLE_TENSOR: "lamb fusedlamb nvlamb lars larc novograd fusednovograd nvnovograd".split(),
}
"""Names of classes, in small letters."""

_WHOLE_MATRIX_PACKAGES = ("apollo_torch", "distributed_shampoo", "galore_torch")
_QUANTISING_PACKAGES = ("bitsandbytes", "torchao")
_QUANTISED_NAMES = ("8bit", "4bit", "fp8")
_QUANTISED_NUMEL = 4096
"""Size from which both packages quantise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Why an optimizer can't work on rows.

    Attributes:
        name: The class it was recognised by.
        reason: In words.
        is_met_by_whole: Whether it can work on parameters that are owned whole.
        from_numel: Elements from which parameters must be owned whole.
    """

    name: str
    reason: str
    is_met_by_whole: bool = True
    from_numel: int = 0

    def check(self, optimizer: torch.optim.Optimizer, divided: dict[int, ParameterSpec]) -> None:
        """Refuse an optimizer whose parameters don't meet its need.

        Args:
            optimizer: About to step.
            divided: By their ids, the parameters whose rows may lie on several owners.

        Raises:
            SpecError: It can't work on its shards; the message says what would help.
        """
        title = f"{self.name} cannot update a sharded model: {self.reason}."
        if not self.is_met_by_whole:
            raise SpecError(
                f"{title} Use an elementwise optimizer, such as torch.optim.AdamW or SGD."
            )
        found = [
            spec
            for group in optimizer.param_groups
            if group.get("use_muon") is not False  # such a group is updated elementwise
            for parameter in group["params"]
            if (spec := divided.get(id(parameter))) is not None and spec.numel >= self.from_numel
        ]
        if found:
            raise SpecError(
                f"{title} {found[0].name!r} of shape {found[0].shape} is divided into rows. Let "
                f"one rank own it whole, with sw.shard(model, ..., whole={self._remedy(found)}), "
                "or leave it to an elementwise optimizer, such as torch.optim.AdamW."
            )

    def _remedy(self, specs: list[ParameterSpec]) -> str:
        if self.from_numel:
            return f"lambda name, p: p.numel() >= {self.from_numel}"
        return "'matrices'" if all(len(spec.shape) == 2 for spec in specs) else "'all'"


def need_of(optimizer: torch.optim.Optimizer) -> Need | None:
    """Say what an optimizer needs beyond rows; None for elementwise ones."""
    for cls in type(optimizer).__mro__:
        if cls is torch.optim.Optimizer:
            break
        name = cls.__name__.lower()
        package = cls.__module__.partition(".")[0]
        for reason, names in _NEVER.items():
            if name in names:
                return Need(reason=reason, name=cls.__name__, is_met_by_whole=False)
        for reason, names in _ONLY_WHOLE.items():
            if name in names:
                return Need(reason=reason, name=cls.__name__)
        if package in _WHOLE_MATRIX_PACKAGES:
            return Need(reason=_WHOLE_MATRIX, name=cls.__name__)
        if package in _QUANTISING_PACKAGES and _quantises(optimizer, name):
            least = getattr(getattr(optimizer, "args", None), "min_8bit_size", _QUANTISED_NUMEL)
            return Need(reason=_QUANTISED, name=cls.__name__, from_numel=least)
    return None


def _quantises(optimizer: torch.optim.Optimizer, name: str) -> bool:
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    return any(part in name for part in _QUANTISED_NAMES) if bits is None else bits < 32
