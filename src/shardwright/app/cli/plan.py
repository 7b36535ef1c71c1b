"""`shardwright plan`: compare layouts before a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.app.cli.errors import writing_output
from shardwright.core.errors import SpecError

if TYPE_CHECKING:
    from shardwright.app.plan import Plans

__all__ = ["plan"]

_TOP = 12
_PER_NODE = 8


def plan(
    *,
    model: Annotated[
        str,
        typer.Option(
            help="Preset such as llama-3-8b, config.json of Hugging Face, or TOML of sizes "
            "(docs/planner.md has one)."
        ),
    ],
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence.")],
    global_batch: Annotated[
        int | None, typer.Option(help="Sequences per step over all ranks.")
    ] = None,
    global_batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens per step over all ranks, instead of --global-batch.")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="TOML file of the cluster, instead of --device and so on.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device, e.g. h100.")] = None,
    devices: Annotated[int | None, typer.Option(help="Devices in all.")] = None,
    devices_per_node: Annotated[
        int | None, typer.Option(help="Devices of a node.  [default: 8]")
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="Network cards of a node, e.g. 8x400g-ib.  [default: what such machines have]"
        ),
    ] = None,
    pcie: Annotated[bool, typer.Option("--pcie", help="No NVLink inside a node.")] = False,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="Compare this strategy only; may be given several times."),
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Fix the sequences per data rank and micro-batch.")
    ] = None,
    checkpointing: Annotated[
        str | None,
        typer.Option(
            help="Fix recomputation: none, selective or full; of other stacks attention_core "
            "(Megatron's selective), half_products (torchtitan's selective op) or alternate (every "
            "other block)."
        ),
    ] = None,
    max_tensor: Annotated[int, typer.Option(help="Largest tensor axis.")] = 8,
    max_pipeline: Annotated[int, typer.Option(help="Most pipeline stages.")] = 16,
    max_chunks: Annotated[
        int, typer.Option(help="Most pieces that a pipeline stage interleaves.")
    ] = 8,
    forward_prefetch: Annotated[int, typer.Option(help="Units gathered ahead in forward.")] = 1,
    backward_prefetch: Annotated[int, typer.Option(help="Units gathered ahead in backward.")] = 1,
    backward_prefetch_at: Annotated[
        str, typer.Option(help="Gather ahead before (pre) or after (post) a unit's backward.")
    ] = "pre",
    max_in_flight: Annotated[
        int, typer.Option(help="Bound on gathers started and not yet used.")
    ] = 2,
    residency: Annotated[
        int | None,
        typer.Option(help="Blocks kept gathered from forward to backward.  [default: chosen]"),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Not modelled: context parallelism.", hidden=True)
    ] = None,
    compression: Annotated[
        str | None, typer.Option(help="What is sent, e.g. gather=int8,reduce=int4.")
    ] = None,
    headroom: Annotated[
        float, typer.Option(help="Share of each device's memory to leave free.")
    ] = 0.05,
    attention: Annotated[
        str | None,
        typer.Option(
            help="Attention kernel: eager, flash1 (also torch's memory-efficient one), flash2 or "
            "flash3 (Hopper).  [default: flash2, flash1 before Ampere]"
        ),
    ] = None,
    loss: Annotated[
        str,
        typer.Option(
            help="Cross-entropy: full (fp32), shifted (of a copy), narrow (logits' dtype), "
            "fused_softmax (one kernel) or chunked (no whole logits)."
        ),
    ] = "full",
    software: Annotated[
        str, typer.Option(help="How a step is executed: eager, compiled or fused.")
    ] = "eager",
    param: Annotated[
        str | None,
        typer.Option(
            help="Dtype of gathered parameters and products: bf16, fp16 or fp32.  [default: bf16, "
            "fp16 before Ampere]"
        ),
    ] = None,
    reduce: Annotated[
        str, typer.Option(help="Dtype in which gradients are reduced: fp32 or bf16.")
    ] = "fp32",
    offload_optimizer: Annotated[
        bool, typer.Option("--offload-optimizer", help="Masters and moments in host memory.")
    ] = False,
    probe: Annotated[
        Path | None, typer.Option(help="JSON of one measured step to scale by.")
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, help="Layouts in the table.  [default: 12]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the recommended layout to this plan file.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Derive the recommended layout's figures.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, not a table.")] = False,
) -> None:
    """Compare strategies and layouts of a run: memory, bytes, time, and which to take.

    Example: shardwright plan --model llama-3-8b --device a100-80 --devices 8 --seq-len 4096
    --global-batch 128
    """
    from shardwright.app.plan import plan as make_plans
    from shardwright.planner.search import SearchSpace
    from shardwright.planner.text_files import require_writable

    _refuse_several({"--json": as_json, "--csv": as_csv, "--explain": explain})
    _refuse_several({"--json": as_json, "--csv": as_csv, "--top": top is not None})
    if out is not None:
        require_writable(out, "plan file")
    workload: dict[str, Any] = {
        "seq_len": seq_len,
        "global_batch": global_batch,
        "global_batch_tokens": global_batch_tokens,
        "micro_batch": micro_batch,
        "checkpointing": checkpointing,
        "attention": attention,
        "loss": loss,
        "software": software,
        "param": param,
        "reduce": reduce,
        "offload_optimizer": offload_optimizer or None,
        "context": context if context != 1 else None,
        "compression": compression,
    }
    plans = make_plans(
        model=model,
        cluster=_cluster(cluster, device, devices, devices_per_node, network, pcie=pcie),
        workload={key: value for key, value in workload.items() if value is not None},
        strategy=strategy,
        settings={
            "forward_prefetch": forward_prefetch,
            "backward_prefetch": backward_prefetch,
            "backward_prefetch_at": backward_prefetch_at,
            "max_in_flight": max_in_flight,
            "residency": residency,
        },
        space=SearchSpace(
            max_tensor=max_tensor,
            max_pipeline=max_pipeline,
            max_chunks=max_chunks,
            headroom=headroom,
        ),
        probe=probe,
    )
    with writing_output():
        print(_shown(plans, top or _TOP, explain=explain, as_json=as_json, as_csv=as_csv))
    if out is not None:
        plans.save(out)


def _shown(plans: Plans, top: int, *, explain: bool, as_json: bool, as_csv: bool) -> str:
    if as_json:
        return plans.to_json()
    if as_csv:
        return plans.to_csv().rstrip("\r\n")
    return plans.table(top) + (f"\n{_explained(plans)}" if explain else "")


def _refuse_several(options: Mapping[str, bool]) -> None:
    """Refuse options of which only one would have an effect."""
    given = [name for name, is_given in options.items() if is_given]
    if len(given) > 1:
        raise SpecError(f"{' and '.join(given)} exclude each other; drop one")


def _cluster(
    file: Path | None,
    device: str | None,
    devices: int | None,
    per_node: int | None,
    network: str | None,
    *,
    pcie: bool,
) -> Any:
    from shardwright.planner.cluster import make_cluster
    from shardwright.planner.files import read_cluster

    if file is not None:
        options = {
            "--device": device,
            "--devices": devices,
            "--devices-per-node": per_node,
            "--network": network,
            "--pcie": pcie or None,
        }
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise SpecError(
                f"--cluster describes the whole cluster, found {', '.join(given)} too; change the "
                f"file {str(file)!r}, or drop --cluster"
            )
        return read_cluster(file)
    if device is None or devices is None:
        raise SpecError("give --cluster FILE.toml, or --device and --devices")
    return make_cluster(
        device,
        devices,
        devices_per_node=_PER_NODE if per_node is None else per_node,
        network=network,
        uses_pcie=pcie,
    )


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
