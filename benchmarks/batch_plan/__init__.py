"""Batches that `quire plan --maximize-batch` finds: predicted and measured times."""
