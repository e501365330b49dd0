"""Fusion: which IR nodes become one kernel (span, cost, partition, planner), and reductions cut in two (split)."""
