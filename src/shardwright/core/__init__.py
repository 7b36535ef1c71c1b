"""The pure core: strategies, layouts, policy and errors, without torch.

Everything here runs on the standard library alone, so that the planner and the engine share it.
"""
