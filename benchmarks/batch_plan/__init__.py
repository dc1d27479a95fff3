"""Batches that `quire plan --maximize-batch` finds, run and compared with its times."""
