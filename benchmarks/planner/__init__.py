"""Accuracy and speed of the planner."""
