"""The leaderboard: eviction rules, budgets, schedules and codecs, compared on equal prompts.

grid.py    entries: a rule, a share, a schedule and a codec
run.py     runs entries on tasks; finished cells are stored
result.py  rows with quality over full KV, bytes and tokens/s, as pages show and JSON stores them
pages.py   Markdown and chart
"""
