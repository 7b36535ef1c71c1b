"""What new users get wrong. Each function runs on ranks and raises what they would see."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.support.models import WIDTH, Block, Stack, TiedDecoder


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def batch() -> torch.Tensor:
    return torch.ones(2, 4, WIDTH)


def wrong_mesh() -> None:
    sw.init_mesh(replicate=2, shard=2)


def zero_sized_axis() -> None:
    sw.init_mesh(shard=0)


def unknown_strategy() -> None:
    sw.shard(Stack(), "zero4")


def unknown_setting() -> None:
    sw.shard(Stack(), "zero3", forward_prefech=2)


def bad_setting() -> None:
    sw.shard(Stack(), "zero3", backward_prefetch_at="before")


def unknown_residency() -> None:
    sw.shard(Stack(), "zero3", residency=["block.0"])


def unit_class_matches_nothing() -> None:
    sw.shard(Stack(), "zero3", units=nn.Conv2d)


def predicate_matches_nothing() -> None:
    sw.shard(Stack(), "zero3", units=lambda module: False)


def other_model_on_rank_1() -> None:
    sw.shard(Stack(3 if rank() == 1 else 4), "zero3")


def other_width_on_rank_1() -> None:
    model = Stack()
    if rank() == 1:
        model.last = nn.Linear(WIDTH, 4)
    sw.shard(model, "zero3")


def other_strategy_on_rank_1() -> None:
    sw.shard(Stack(), "zero2" if rank() == 1 else "zero3")


def frozen_on_rank_1() -> None:
    model = Stack()
    if rank() == 1:
        model.first.weight.requires_grad_(False)
    sw.shard(model, "zero3")


def parameter_on_another_device() -> None:
    model = Stack()
    model.blocks[1] = Block().to("meta")
    sw.shard(model, "zero3")


def parameter_without_values_on_rank_0() -> None:
    model = Stack()
    if rank() == 0:
        model.blocks[1] = Block().to("meta")
    sw.shard(model, "zero3")


def sparse_embedding() -> None:
    model = TiedDecoder()
    model.embedding.sparse = True
    sw.shard(model, "zero3")


def no_parameters() -> None:
    sw.shard(nn.Sequential(nn.ReLU()), "zero3")


def integer_parameters() -> None:
    model = Stack()
    model.register_parameter("codes", nn.Parameter(torch.ones(3, dtype=torch.int8), False))
    sw.shard(model, "zero3")


def sharded_twice() -> None:
    sw.shard(sw.shard(Stack(), "zero3"), "zero3")


def sub_module_sharded_before() -> None:
    model = Stack()
    sw.shard(model.blocks[0], "zero3")
    sw.shard(model, "zero3")


def lbfgs() -> None:
    model = sw.shard(Stack(), "zero3")
    optimizer = torch.optim.LBFGS(model.parameters())
    model(batch()).mean().backward()
    optimizer.step(lambda: model(batch()).mean())


def adafactor() -> None:
    model = sw.shard(Stack(), "zero3")
    optimizer = torch.optim.Adafactor(model.parameters())
    model(batch()).mean().backward()
    optimizer.step()


def optimizer_stepped_before_shard() -> None:
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model = sw.shard(model, "zero3")
    model(batch()).mean().backward()
    optimizer.step()


def state_dict_of_shards() -> None:
    sw.shard(Stack(), "zero3").state_dict()


def state_dict_of_a_block() -> None:
    sw.shard(Stack(), "zero3").blocks[1].state_dict()


def load_into_shards() -> None:
    state = Stack().state_dict()
    sw.shard(Stack(), "zero3").load_state_dict(state)


def step_while_accumulating() -> None:
    model = sw.shard(Stack(), "zero3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sw.accumulate(model):
        model(batch()).mean().backward()
    optimizer.step()


def clip_while_accumulating() -> None:
    model = sw.shard(Stack(), "zero3")
    with sw.accumulate(model):
        model(batch()).mean().backward()
    sw.clip_grad_norm_(model, 1.0)


def weight_used_outside_its_unit() -> None:
    class Leaky(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.blocks[0].norm.bias.exp().sum()

    model = sw.shard(Leaky(), "zero3")
    model(batch()).mean().backward()


def auxiliary_loss_kept_on_self() -> None:
    class Keeps(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.aux = self.up(x).mean()
            return super().forward(x)

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Keeps() for _ in range(4)])

    model = sw.shard(Model(), "zero3")
    model(batch())
    sum(b.aux for b in model.blocks).backward()


def deep_copy() -> None:
    copy.deepcopy(sw.shard(Stack(), "zero3"))


def tied_after_shard() -> None:
    model = sw.shard(TiedDecoder(), "zero3")
    model.head.weight = nn.Parameter(torch.zeros(11, 7))
    model(torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long))


def embedding_with_max_norm() -> None:
    model = TiedDecoder()
    model.embedding.max_norm = 1.0
    sw.shard(model, "zero3")


def old_weight_norm() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 16)), nn.Linear(16, 5))
    sw.shard(model, "zero3")


def gradient_before_shard() -> None:
    model = Stack()
    model(batch()).mean().backward()
    sw.shard(model, "zero3")


def written_in_forward() -> None:
    class Normalises(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.first.weight.div_(2.0)
            return super().forward(x)

    sw.shard(Normalises(), "zero3", units=Block)(batch())


def step_while_unsharded() -> None:
    model = sw.shard(Stack(), "zero3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch()).mean().backward()
    with sw.unsharded(model, writeback=True):
        optimizer.step()


def other_shape_written_back() -> None:
    model = sw.shard(Stack(), "zero3")
    with sw.unsharded(model, writeback=True):
        model.last.weight = nn.Parameter(torch.zeros(4, 7))


def dtype_for_precision() -> None:
    sw.shard(Stack(), "zero3", precision=torch.bfloat16)


def pickled() -> None:
    torch.save(sw.shard(Stack(), "zero3"), io.BytesIO())


def backward_after_step() -> None:
    model = sw.shard(Stack(), "zero3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = model(batch()).mean()
    model(batch()).mean().backward()
    optimizer.step()
    kept.backward()


def moved_after_shard() -> None:
    model = sw.shard(Stack(), "zero3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch()).mean().backward()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    optimizer.step()


def create_graph() -> None:
    model = sw.shard(Stack(), "zero3")
    model(batch()).mean().backward(create_graph=True)


def unfrozen_after_shard() -> None:
    model = Stack()
    model.first.weight.requires_grad_(False)
    model = sw.shard(model, "zero3")
    model.first.weight.requires_grad_(True)
    model(batch())


def unsharded_in_forward() -> None:
    class Looks(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with sw.unsharded(self):
                return super().forward(x)

    sw.shard(Looks(), "zero3")(batch())


def plain_model_in_ledger() -> None:
    sw.ledger(Stack())


def not_a_module() -> None:
    sw.shard(torch.ones(3), "zero3")


def not_a_mesh() -> None:
    sw.shard(Stack(), "zero3", mesh=4)


def reshard_setting_against_strategy() -> None:
    sw.shard(Stack(), "zero3", reshard_after_backward=False)


def negative_clip() -> None:
    sw.clip_grad_norm_(sw.shard(Stack(), "zero3"), -1.0)


def layer_called_outside_its_unit() -> None:
    model = sw.shard(Stack(), "zero3")
    with torch.no_grad():
        model.blocks[1].up(batch())


def weight_multiplied_outside_its_unit() -> None:
    model = sw.shard(Stack(), "zero2")
    batch() @ model.blocks[2].up.weight.T


def weight_indexed_outside_its_unit() -> None:
    model = sw.shard(TiedDecoder(), "zero1")
    model.embedding.weight.detach()  # rows of this rank: allowed
    model.embedding.weight[3]


def _with_gradients(strategy: str = "zero3", **settings: Any) -> Stack:
    model = sw.shard(Stack(), strategy, **settings)
    model(batch()).square().mean().backward()
    return model


def torch_clipping() -> None:
    nn.utils.clip_grad_norm_(_with_gradients().parameters(), 1.0, foreach=True)


def torch_clipping_one_by_one() -> None:
    nn.utils.clip_grad_norm_(_with_gradients("zero1").parameters(), 1.0, foreach=False)


def torch_clipping_of_whole_parameters() -> None:
    nn.utils.clip_grad_norm_(_with_gradients(whole="all").parameters(), 1.0)


def norm_of_a_gradient() -> None:
    _with_gradients("zero2").last.weight.grad.detach().data.norm(2)


def norm_of_all_gradients_in_a_row() -> None:
    gradients = [p.grad.detach().view(-1) for p in _with_gradients().parameters()]
    torch.cat(gradients).norm()


def sum_of_a_gradients_squares() -> None:
    gradient = _with_gradients("zero1").last.weight.grad
    (gradient * gradient / 2).sum()


def norms_of_scaled_gradients() -> None:
    gradients = [p.grad for p in _with_gradients().parameters()]
    torch._foreach_norm(torch._foreach_mul(gradients, 0.5))


def normalising_hook() -> None:
    model = sw.shard(Stack(), "zero3")
    model.last.weight.register_hook(lambda g: g / g.abs().sum())
    model(batch()).square().mean().backward()


def torch_scaler() -> None:
    model = sw.shard(Stack(), "zero3")
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(batch()).square().mean()).backward()
    scaler.step(optimizer)


class Normalised(torch.optim.SGD):
    """Divides each gradient by its norm, under a name nobody knows."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm())
        super().step(closure)


def optimizer_that_combines_elements() -> None:
    model = _with_gradients()
    Normalised(model.parameters(), lr=0.1).step()


def functional_call() -> None:
    model = sw.shard(Stack(), "zero3")
    values = {n: torch.zeros(p.global_shape) for n, p in model.named_parameters()}
    torch.func.functional_call(model, values, (batch(),))


def statistic_of_a_weight() -> None:
    model = sw.shard(Stack(), "zero3")
    model.last.weight.norm()


def statistic_of_a_detached_weight() -> None:
    model = sw.shard(Stack(), "zero3")
    model.last.weight.data.float().norm()


def weight_as_an_array() -> None:
    model = sw.shard(Stack(), "zero3")
    model.last.weight.detach().cpu().numpy()


def module_replaced_after_shard() -> None:
    model = sw.shard(Stack(), "zero3")
    model.blocks[0].up = nn.Linear(WIDTH, 2 * WIDTH + 1)


def block_appended_after_shard() -> None:
    model = sw.shard(Stack(), "zero2")
    model.blocks.append(Block())


def parameter_added_after_shard() -> None:
    model = sw.shard(Stack(), "ddp")
    model.blocks[1].gain = nn.Parameter(torch.ones(WIDTH))


def parametrized_after_shard() -> None:
    model = sw.shard(Stack(), "zero3")
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].up)


def parameter_of_rows() -> None:
    model = sw.shard(Stack(), "zero3")
    nn.Parameter(model.last.weight)


def initialised_after_shard() -> None:
    model = sw.shard(Stack(), "zero3")
    model.apply(lambda m: nn.init.xavier_uniform_(m.weight) if isinstance(m, nn.Linear) else None)


def orthogonal_after_shard() -> None:
    nn.init.orthogonal_(sw.shard(Stack(), "zero3").last.weight)


def drawn_after_shard() -> None:
    sw.shard(Stack(), "zero3").last.weight.data.normal_()


def sum_of_squares_outside_its_unit() -> None:
    model = sw.shard(Stack(), "zero3")
    model.last.weight.detach().pow(2).sum()


def singular_values_outside_their_unit() -> None:
    torch.linalg.svdvals(sw.shard(Stack(), "zero3").last.weight.detach())


def cast_after_shard() -> None:
    sw.shard(Stack(), "zero3").to(torch.bfloat16)


def block_cast_after_shard() -> None:
    sw.shard(Stack(), "zero3").blocks[2].half()
