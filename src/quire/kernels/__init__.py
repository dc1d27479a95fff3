"""Stateless tensor functions: attention backends, paging, codes and sampling."""
