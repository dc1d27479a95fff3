"""The engine: builds memory, scheduler and runner, and steps them to generate tokens."""
