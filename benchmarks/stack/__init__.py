"""Combined optimizations of KV memory, each added to the ones before, in equal bytes."""
