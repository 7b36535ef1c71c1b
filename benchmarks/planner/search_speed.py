"""Time of searching layouts for 70B on 1,024 devices, and of one prediction.

python -m benchmarks.planner.search_speed
"""

from __future__ import annotations

import time

from shardwright.planner.cluster import make_cluster
from shardwright.planner.model_presets import find_model
from shardwright.planner.search import search
from shardwright.planner.workload import WorkloadSpec


def main() -> None:
    cluster = make_cluster("h100", 1024, network="8x400g-ib")
    workload = WorkloadSpec(seq_len=8192, micro_batch=1)
    start, cpu = time.perf_counter(), time.process_time()
    result = search(find_model("llama-3-70b"), cluster, workload, 2048)
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    print(
        f"{result.num_considered} candidates, {result.num_fitting} fit, "
        f"{len(result.candidates)} replayed: {wall_s:.2f} s ({cpu_s:.2f} s of one core)"
    )
    print(f"best: {result.best.job.layout.describe()}")


if __name__ == "__main__":
    main()
