"""Request routing between replicas: torch-free, without network code.

from quire.scale.routing.policies import RouterConfig, make_router

router = make_router(RouterConfig(name="kv_aware"), block_tokens=16)
replica_id = router.choose(request, loads)     # loads: one ReplicaLoad for each live replica
router.note_sent(request, replica_id)
...                                            # the replica finishes, fails or aborts it
router.note_finished(request, replica_id)
"""
