"""The planner: what a run will cost in memory, bytes and time, and which layout to take.

`model`, `cluster`, `workload` and `layout` describe a job; `cost` holds one formula per function;
`simulate` replays the actions of the engine's own policy over lanes and links; `predict` joins
them; `search` compares layouts. Pure Python: no torch, no numpy.
"""
