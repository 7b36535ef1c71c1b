"""`shardwright plan`: compare layouts before a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.core.errors import SpecError

if TYPE_CHECKING:
    from shardwright.app.plan import Plans

__all__ = ["plan"]


def plan(
    *,
    model: Annotated[
        str, typer.Option(help="Preset, config.json of Hugging Face, or TOML file of sizes.")
    ],
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence.")],
    global_batch: Annotated[
        int | None, typer.Option(help="Sequences per step over all ranks.")
    ] = None,
    global_batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens per step instead.")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="TOML file of the cluster.")] = None,
    device: Annotated[str | None, typer.Option(help="Device, e.g. h100.")] = None,
    devices: Annotated[int | None, typer.Option(help="Devices in all.")] = None,
    devices_per_node: Annotated[int, typer.Option(help="Devices of a node.")] = 8,
    network: Annotated[
        str | None, typer.Option(help="Network cards of a node, e.g. 8x400g-ib.")
    ] = None,
    pcie: Annotated[bool, typer.Option("--pcie", help="No NVLink inside a node.")] = False,
    strategy: Annotated[
        list[str] | None, typer.Option(help="Compare these strategies only.")
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Fix the micro-batch.")] = None,
    checkpointing: Annotated[
        str | None, typer.Option(help="Fix recomputation: none, selective or full.")
    ] = None,
    max_tensor: Annotated[int, typer.Option(help="Largest tensor axis.")] = 8,
    max_pipeline: Annotated[int, typer.Option(help="Most pipeline stages.")] = 16,
    max_chunks: Annotated[
        int, typer.Option(help="Most pieces that a pipeline stage interleaves.")
    ] = 1,
    forward_prefetch: Annotated[int, typer.Option(help="Units gathered ahead in forward.")] = 1,
    backward_prefetch: Annotated[int, typer.Option(help="Units gathered ahead in backward.")] = 1,
    backward_prefetch_at: Annotated[
        str, typer.Option(help="Gather ahead before (pre) or after (post) a unit's backward.")
    ] = "pre",
    max_in_flight: Annotated[
        int, typer.Option(help="Bound on gathers started and not yet used.")
    ] = 2,
    residency: Annotated[
        int, typer.Option(help="Blocks kept gathered from forward to backward.")
    ] = 0,
    context: Annotated[int, typer.Option(help="Not modelled: context parallelism.")] = 1,
    compression: Annotated[
        str | None, typer.Option(help="Not modelled: compressed collectives.")
    ] = None,
    headroom: Annotated[float, typer.Option(help="Share of memory to leave free.")] = 0.05,
    attention: Annotated[str, typer.Option(help="Attention kernel.")] = "flash2",
    loss: Annotated[str, typer.Option(help="full, fused_softmax or chunked.")] = "full",
    software: Annotated[str, typer.Option(help="eager, compiled or fused.")] = "eager",
    reduce: Annotated[str, typer.Option(help="Dtype of gradients on the wire.")] = "fp32",
    offload_optimizer: Annotated[
        bool, typer.Option("--offload-optimizer", help="Masters and moments in host memory.")
    ] = False,
    probe: Annotated[
        Path | None, typer.Option(help="JSON of one measured step to scale by.")
    ] = None,
    top: Annotated[int, typer.Option(help="Layouts to show.")] = 12,
    out: Annotated[Path | None, typer.Option(help="Write the best as a plan file.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Derive the best layout's figures.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """Compare strategies and layouts of a run: memory, bytes, time, and which to take.

    Example: shardwright plan --model llama-3-8b --device a100-80 --devices 8 --seq-len 4096
    --global-batch 128
    """
    from shardwright.app.plan import plan as make_plans
    from shardwright.planner.search import SearchSpace

    workload: dict[str, Any] = {
        "seq_len": seq_len,
        "global_batch": global_batch,
        "global_batch_tokens": global_batch_tokens,
        "micro_batch": micro_batch,
        "checkpointing": checkpointing,
        "attention": attention,
        "loss": loss,
        "software": software,
        "reduce": reduce,
        "offload_optimizer": offload_optimizer or None,
        "context": context if context != 1 else None,
        "compression": compression,
    }
    plans = make_plans(
        model=model,
        cluster=_cluster(cluster, device, devices, devices_per_node, network, pcie=pcie),
        workload={key: value for key, value in workload.items() if value is not None},
        settings={
            "forward_prefetch": forward_prefetch,
            "backward_prefetch": backward_prefetch,
            "backward_prefetch_at": backward_prefetch_at,
            "max_in_flight": max_in_flight,
            "residency": residency,
        },
        space=SearchSpace(
            strategies=_strategies(strategy or []),
            max_tensor=max_tensor,
            max_pipeline=max_pipeline,
            max_chunks=max_chunks,
            headroom=headroom,
        ),
        probe=probe,
    )
    if out is not None:
        plans.save(out)
    print(_shown(plans, top, explain=explain, as_json=as_json, as_csv=as_csv))


def _shown(plans: Plans, top: int, *, explain: bool, as_json: bool, as_csv: bool) -> str:
    if as_json:
        return plans.to_json()
    if as_csv:
        return plans.to_csv().rstrip("\r\n")
    return plans.table(top) + (f"\n{_explained(plans)}" if explain else "")


def _cluster(
    file: Path | None,
    device: str | None,
    devices: int | None,
    per_node: int,
    network: str | None,
    *,
    pcie: bool,
) -> Any:
    from shardwright.planner.cluster import make_cluster
    from shardwright.planner.files import read_cluster

    if file is not None:
        return read_cluster(file)
    if device is None or devices is None:
        raise SpecError("give --cluster FILE.toml, or --device and --devices")
    return make_cluster(device, devices, devices_per_node=per_node, network=network, uses_pcie=pcie)


def _strategies(names: list[str]) -> tuple[str, ...]:
    from shardwright.core.strategy import resolve_strategy

    return tuple(resolve_strategy(name).name for name in names)


def _explained(plans: Plans) -> str:
    from shardwright.planner.explain import explain

    blocks = []
    for item in explain(plans.best):
        parts = "\n".join(
            f"      {value:12.4f} {item.unit:4s} {name}" for name, value in item.parts.items()
        )
        blocks.append(
            f"\n{item.title}: {item.total:.4f} {item.unit}\n{parts}\n"
            f"  1. why: {item.why}\n"
            f"  2. picture: {item.picture}\n"
            f"  3. small numbers: {item.small_numbers}\n"
            f"  4. formula: {item.formula}\n"
            f"  5. sanity: {item.sanity}"
        )
    return "\n".join(blocks)
