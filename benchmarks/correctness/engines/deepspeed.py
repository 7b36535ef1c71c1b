"""DeepSpeed's ZeRO stages, where DeepSpeed is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from benchmarks.correctness.engines.base import Engine, Session, Setup
from benchmarks.correctness.findings import NotApplicable

__all__ = ["DeepSpeed"]


class DeepSpeedSession(Session):
    """A model inside a DeepSpeed engine, which divides, reduces, clips and steps by itself."""

    module: Any

    def __init__(
        self, module: nn.Module, inner: Any, optimizer: torch.optim.Optimizer | None, setup: Setup
    ) -> None:
        super().__init__(module, inner, optimizer, setup)
        self._backwards = 0

    def several_backwards(self) -> AbstractContextManager[Any]:
        """``coalesce_grad_reduction``."""
        coalesced: AbstractContextManager[Any] = self.module.coalesce_grad_reduction()
        return coalesced

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """The engine's backward, and its step after each that isn't the last of a step."""
        self.module.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)
        self._backwards += 1
        if self._backwards % self.setup.backwards_per_step:
            self.module.step()

    def clip(self) -> None:
        """By configuration, in `step`."""

    def step(self) -> None:
        """The engine's step; it knows the norm afterwards."""
        self.module.step()
        self._backwards = 0
        self.norm = self.module.get_global_grad_norm()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Done by `step`."""

    def full_state(self) -> dict[str, torch.Tensor]:
        """The state dict with parameters gathered."""
        with self._gathered():
            return super().full_state()

    def load_full_state(self, state: dict[str, torch.Tensor]) -> None:
        """Optimizers' masters would not follow."""
        raise NotApplicable("loads plain states before the engine is made")

    def has_gradients(self) -> dict[str, bool] | None:
        """Partitioned elsewhere than in ``.grad``."""
        return None

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        """With parameters gathered."""
        with self._gathered():
            return super().generate(x)

    def weight_norm(self) -> float:
        """With parameters gathered."""
        with self._gathered():
            return super().weight_norm()

    def scale_parameters(self, factor: float) -> None:
        """Both the parameters and their masters, in the two ways documented."""
        import deepspeed

        parameters = list(self.inner.parameters())
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            for parameter in parameters:
                parameter.mul_(factor)
        for parameter in parameters:
            master = deepspeed.utils.safe_get_full_fp32_param(parameter)
            deepspeed.utils.safe_set_full_fp32_param(parameter, factor * master)

    def recover(self) -> None:
        """Nothing documented; the count of backwards starts again."""
        self._backwards = 0

    def _gathered(self) -> Any:
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(self.inner.parameters()))


class DeepSpeed(Engine):
    """One stage; float32, since its master weights are."""

    dtype = torch.float32
    tolerance = 1e-6

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.name = f"DeepSpeed ZeRO-{stage}"

    def version(self) -> str:
        """DeepSpeed's, or that it isn't installed."""
        try:
            return importlib.metadata.version("deepspeed")
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    def lacks(self, setup: Setup) -> str | None:
        """What its configuration has no word for."""
        is_missing = {
            "DeepSpeed isn't installed here": importlib.util.find_spec("deepspeed") is None,
            "its ZeRO stages have no replicate axis": setup.shape is not None,
            "takes the optimizer when it takes the model": setup.warm_up is not None,
            "clips by the 2-norm only": setup.norm_type != 2.0,
            "decides by itself what to prefetch": setup.keeps_gathered or setup.prefetches,
            "scales losses in its fp16 mode only": setup.scales_loss,
            "knows the norm only after the step": setup.skips_by_norm,
        }
        return next((what for what, missing in is_missing.items() if missing), None)

    def start(self) -> None:
        """DeepSpeed's own start, on gloo."""
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)

    def prepare(self, model: nn.Module, setup: Setup) -> Session:
        """``deepspeed.initialize`` with the user's optimizer."""
        import deepspeed

        inner = self.checkpoint(model, setup)
        optimizer = setup.make_optimizer(inner.parameters())
        config = self._configuration(setup)
        if setup.chooses and self.stage == 3:
            deepspeed.utils.set_z3_leaf_modules(inner, list(setup.chooses))
        engine, *_ = deepspeed.initialize(model=inner, optimizer=optimizer, config=config)
        return DeepSpeedSession(engine, inner, None, setup)

    def _configuration(self, setup: Setup) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": setup.backwards_per_step,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": setup.max_norm or 0.0,
        }

    def initialise(self, build: Callable[[], nn.Module], seed: int, *, alone: bool) -> Any:
        """Inside ``deepspeed.zero.Init``; alone, the plain model, for a group of one is that."""
        import deepspeed

        torch.manual_seed(seed)
        if alone:
            return dict(build().state_dict())
        if self.stage < 3:
            raise NotApplicable("shards no parameters")
        with deepspeed.zero.Init(config_dict_or_path=self._configuration(Setup())):
            model = build()
        return DeepSpeedSession(model, model, None, Setup()).full_state()
