"""Load of `quire serve`: many streaming clients at once, some of which disconnect."""
