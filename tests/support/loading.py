"""Load safetensors into sharded models. Runs on ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import shardwright as sw
from shardwright.runtime import loading
from tests.support.deferred import on_meta, values_of
from tests.support.models import TiedDecoder, tokens_for
from tests.support.parity import STRATEGIES, mesh_of


class Decoder(TiedDecoder):
    """`TiedDecoder` with buffers, persistent and not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("inv_freq", torch.arange(3) / 4, persistent=False)


def plain(seed: int = 21) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder()
    model.steps.fill_(12)
    model.mean.copy_(torch.tensor([0.5, -1.0, 2.0]))
    nn.init.normal_(model.scale)
    return model


def state_to_save(model: nn.Module) -> dict[str, torch.Tensor]:
    """A state with one name of each tied parameter, as safetensors wants it."""
    state = {k: v.contiguous() for k, v in model.state_dict().items()}
    state.pop("embedding.weight", None)
    return state


def save_one_file(folder: Path) -> Path:
    save_file(state_to_save(plain()), folder / "weights.safetensors")
    return folder / "weights.safetensors"


def save_folder(folder: Path) -> Path:
    save_file(state_to_save(plain()), folder / "model.safetensors")
    return folder


def save_in_parts(folder: Path) -> Path:
    state = state_to_save(plain())
    files = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(state)}
    for file in set(files.values()):
        save_file({n: t for n, t in state.items() if files[n] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def without_values(how: str) -> nn.Module:
    if how == "meta_init":
        return on_meta(Decoder, 4)
    if how == "real":
        return plain(4)
    with torch.device("meta"):
        model = Decoder()
    # Buffers must be real, those that no file has above all.
    model.steps, model.mean = torch.tensor(0), torch.zeros(3)
    model.inv_freq = torch.arange(3) / 4
    return model


def difference_after_loading(path: str, shape: tuple[int, int], how: str) -> list[str]:
    """Load under every strategy and compare with the plain model; returns what differs."""
    expected, wrong = plain(), []
    batch = tokens_for(0, 0, 1)
    for strategy in STRATEGIES:
        model = sw.shard(without_values(how), strategy, mesh=mesh_of(shape), initialize=False)
        if how != "real":
            assert all(p.isnan().all() for p in model.parameters())
        sw.load_safetensors(model, path)
        loss, plain_loss = (m(batch[:, :-1], batch[:, 1:]) for m in (model, expected))
        if not torch.equal(loss, plain_loss):
            wrong.append(f"{strategy}: losses {loss.item()} and {plain_loss.item()}")
        loss.backward()
        with sw.unsharded(model):
            actual = values_of(model)
            for name, value in values_of(expected).items():
                if actual[name].dtype != value.dtype or not torch.equal(actual[name], value):
                    wrong.append(f"{strategy}: {name}")
    return wrong


def loss_after_loading_between_steps(path: str, shape: tuple[int, int]) -> tuple[float, float]:
    """Losses in bfloat16 of a model that trained, then loaded, and of one that only loaded."""
    mesh, losses = mesh_of(shape), []
    batch = tokens_for(0, 0, 1)
    for steps in (2, 0):
        precision = sw.Precision(param=torch.bfloat16)
        model = sw.shard(plain(4), "zero2", mesh=mesh, precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(batch[:, :-1], batch[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(batch[:, :-1], batch[:, 1:])  # what it gathers and casts is of the old values
        sw.load_safetensors(model, Path(path))
        with torch.no_grad():
            losses.append(model(batch[:, :-1], batch[:, 1:]).item())
    return losses[0], losses[1]


class _Counted:
    """A file as `safe_open` gives it, that notes what is read."""

    def __init__(self, opened: Any, reads: list[tuple[str, int, int]]) -> None:
        self.opened = opened
        self.reads = reads

    def __enter__(self) -> _Counted:
        self.file = self.opened.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.opened.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self.file.keys())

    def get_tensor(self, name: str) -> torch.Tensor:
        self.reads.append((name, -1, -1))
        return self.file.get_tensor(name)

    def get_slice(self, name: str) -> Any:
        return _CountedSlice(self, name)


class _CountedSlice:
    def __init__(self, file: _Counted, name: str) -> None:
        self.file, self.name = file, name
        self.inner = file.file.get_slice(name)
        self.get_shape, self.get_dtype = self.inner.get_shape, self.inner.get_dtype

    def __getitem__(self, rows: slice) -> torch.Tensor:
        self.file.reads.append((self.name, rows.start, rows.stop))
        return self.inner[rows]


def reads(path: str, shape: tuple[int, int]) -> tuple[list[Any], list[Any]]:
    """What was read of the files, ``(name, start, stop)``, and what this rank holds."""
    model = sw.shard(on_meta(Decoder), "zero3", mesh=mesh_of(shape), initialize=False)
    found: list[tuple[str, int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        original = loading.safe_open
        patch.setattr(loading, "safe_open", lambda *a, **k: _Counted(original(*a, **k), found))
        sw.load_safetensors(model, path)
    names = {"embedding.weight": "head.weight"}
    held = [
        (names.get(p.full_name, p.full_name), *(p.rows if p.global_shape else (-1, -1)))
        for p in model.parameters()
        if p.numel()
    ]
    held += [("steps", -1, -1), ("mean", -1, -1)]
    return sorted(found), sorted(held)


def _break(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    state = state_to_save(plain())
    change(state)
    save_file(state, folder / "broken.safetensors")
    return folder / "broken.safetensors"


def renamed(folder: Path) -> Path:
    def change(state: dict[str, torch.Tensor]) -> None:
        state["block.0.up.weight"] = state.pop("blocks.0.up.weight")
        state["extra"] = torch.ones(2)

    return _break(folder, change)


def reshaped(folder: Path) -> Path:
    return _break(folder, lambda state: state.update({"norm.bias": torch.ones(8)}))


def integers(folder: Path) -> Path:
    return _break(folder, lambda s: s.update({"norm.bias": torch.ones(7, dtype=torch.int32)}))


def torn(folder: Path) -> Path:
    path = save_one_file(folder)
    path.write_bytes(path.read_bytes()[:-100])
    return path


def not_there(folder: Path) -> Path:
    return folder / "nowhere"


def empty_folder(folder: Path) -> Path:
    return folder


def file_missing_of_parts(folder: Path) -> Path:
    save_in_parts(folder)
    (folder / "model-1.safetensors").unlink()
    return folder


def index_that_leaves_the_folder(folder: Path) -> Path:
    index = {"weight_map": {"norm.bias": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def load_into_a_trained_model(path: str, on_rank: int | None = None) -> list[str]:
    """Try to load, then say what changed in the model; the error is raised if nothing did."""
    mesh = mesh_of((1, 2))
    model = sw.shard(plain(4), "zero3", mesh=mesh)
    before = [p.detach().clone() for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    folder = Path(path)
    good = folder.parent / "good.safetensors"
    chosen = folder if on_rank is None or mesh.data_rank == on_rank else good
    try:
        sw.load_safetensors(model, chosen)
    except sw.ShardwrightError as error:
        pairs = zip([*before, *buffers], [*model.parameters(), *model.buffers()], strict=True)
        if not all(torch.equal(a, b) for a, b in pairs):
            return ["changed"]
        raise error from None
    return ["nothing was raised"]


def values_after_loose_loading(path: str) -> tuple[bool, bool, bool]:
    """Load with strict=False: whether what is missing stayed, and what is there was loaded."""
    model = sw.shard(plain(4), "zero3", mesh=mesh_of((1, 2)))
    sw.load_safetensors(model, path, strict=False)
    old, new = plain(4), plain()
    with sw.unsharded(model):
        actual = values_of(model)
        name, other = "blocks.0.up.weight", "blocks.1.up.weight"
        return (
            torch.equal(actual[name], old.get_parameter(name)),
            torch.equal(actual[other], new.get_parameter(other)),
            torch.equal(actual["steps"], new.steps),
        )


def load_into_a_part(path: str) -> None:
    model = sw.shard(plain(4), "zero3", mesh=mesh_of((1, 2)))
    sw.load_safetensors(model.blocks[0], path)


def load_while_unsharded(path: str) -> None:
    model = sw.shard(plain(4), "zero3", mesh=mesh_of((1, 2)))
    with sw.unsharded(model):
        sw.load_safetensors(model, path)


def load_into_a_plain_model(path: str) -> None:
    sw.load_safetensors(plain(4), path)


def llama_logits(path: str, shape: tuple[int, int], tied: bool) -> tuple[bool, bool]:
    """Whether a loaded Llama gives the plain one's logits, and one that isn't gives NaN."""
    from transformers import AutoModelForCausalLM

    config = llama_config(tied)
    with sw.meta_init():
        model = AutoModelForCausalLM.from_config(config)
    assert all(p.is_meta for p in model.parameters())
    sw.shard(model, "zero3", mesh=mesh_of(shape), initialize=False)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        forgotten = model(tokens).logits
        sw.load_safetensors(model, path)
        loaded = model(tokens).logits
        expected = plain_llama(tied)(tokens).logits
    return torch.equal(loaded, expected), bool(forgotten.isnan().all())


def llama_config(tied: bool) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=41,
        hidden_size=24,
        intermediate_size=36,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )


def plain_llama(tied: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(6)
    return AutoModelForCausalLM.from_config(llama_config(tied))


def llama_initial_values(shape: tuple[int, int]) -> tuple[bool, float]:
    """Whether a replayed Llama equals the materialised one, and a matrix's spread."""
    from transformers import AutoModelForCausalLM

    def make() -> nn.Module:
        return AutoModelForCausalLM.from_config(llama_config(tied=True))

    expected = values_of(sw.materialize_(on_meta(make, 2)))
    model = sw.shard(on_meta(make, 2), "zero3", mesh=mesh_of(shape))
    with sw.unsharded(model):
        actual = values_of(model)
        same = all(torch.equal(actual[k], v) for k, v in expected.items())
    return same, expected["model.layers.0.mlp.up_proj.weight"].std().item()


def a_rank_dies_before_loading(path: str) -> None:
    """Rank 1 of 3 is gone when the others agree on the file."""
    model = sw.shard(without_values("meta_init"), "zero3", mesh=mesh_of((1, 3)))
    if dist.get_rank() == 1:
        os._exit(3)
    sw.load_safetensors(model, path)
