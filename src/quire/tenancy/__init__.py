"""Tenants: accounts, limits and the fair queue."""
