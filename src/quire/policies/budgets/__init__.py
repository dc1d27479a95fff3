"""Budgets: how a cap is divided over layers and heads; one division a file, found by being here."""
