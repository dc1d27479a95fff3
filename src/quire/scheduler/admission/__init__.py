"""Admission of waiting requests: rules, page arithmetic, checks of free pages."""
