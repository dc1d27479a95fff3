"""The prefix cache's second tier: disk and network."""
