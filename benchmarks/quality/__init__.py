"""Quality of a model with an eviction rule, KV codec or weight codec: graded tasks and texts."""
