"""Schedules of a step with offloaded KV and weights: work, planner, virtual clock."""
