"""kvpress's presses as rows of a leaderboard; their code runs in another environment.

spec.py      texts of presses, the default ones, and those that have no budget
process.py   starts the process of the other environment, sends jobs and reads results
worker.py    that process: imports kvpress, and nothing of Quire
run.py       runs presses on the prompts of a leaderboard; finished cells are stored
"""
