"""Views of a running engine for its operators: pages, requests, prefixes, tenants.

Every view is read between two steps and copies only what it needs; encoding happens elsewhere.
"""
