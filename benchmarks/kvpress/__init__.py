"""`python -m benchmarks kvpress`: presses of kvpress on the prompts of a leaderboard."""
