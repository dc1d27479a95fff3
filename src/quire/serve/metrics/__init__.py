"""Metrics of the server for Prometheus, under the names of Quire and of vLLM."""
