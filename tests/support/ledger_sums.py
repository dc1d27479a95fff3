import json


def check_sums(found):
    """Check that each axis adds up to the used pages, and all owners to the arena."""
    axes = found["axes"]
    device_bytes = axes["location"]["device"]
    assert sum(axes["owner"].values()) == found["total_bytes"]
    assert found["used_bytes"] + found["free_bytes"] == found["total_bytes"]
    assert device_bytes == found["used_bytes"] - axes["owner"]["slab_borders"]
    assert axes["location"]["host"] == found["host"]["used_bytes"]
    for axis in ("codec", "exactness", "sharing", "references"):
        assert sum(axes[axis].values()) == device_bytes
    held = [row["kv_bytes"] for row in found["requests"]]
    cached = [extent["bytes"] for extent in found["prefix_cache"]]
    assert sum(held) == axes["owner"]["requests"]
    assert sum(cached) == axes["owner"]["prefix_cache"]
    for name in ("kv_bytes", "host_bytes"):
        assert sum(row[name] for row in found["requests"]) == sum(
            tenant[name] for tenant in found["tenants"]
        )
    for row in found["requests"]:
        assert row["kv_bytes"] == sum(extent["bytes"] for extent in row["extents"])
    assert json.loads(json.dumps(found)) == found
