"""Budgets divide a cap over layers and heads; one budget per module, registered on import."""
