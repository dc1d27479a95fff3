"""One decode step as operations and what each of them waits for."""
