"""How a batch changes: who may enter it at a step, and what a step contains. One rule a file."""
