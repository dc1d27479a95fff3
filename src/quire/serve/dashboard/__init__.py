"""The dashboard at /dashboard: static files without a build step, and their routes."""
