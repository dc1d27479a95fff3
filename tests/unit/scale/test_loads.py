"""Loads of replicas between two reports."""

from quire.scale.routing.base import ReplicaLoad
from quire.scale.routing.loads import LoadView


def test_requests_sent_after_a_report_are_added_until_the_next():
    view = LoadView()
    view.report(ReplicaLoad(replica_id="a", queued_prompt_tokens=100, queued_requests=1))
    view.sent("a", 30)
    view.sent("a", 20)

    assert view.loads()["a"].queued_prompt_tokens == 150
    assert view.loads()["a"].queued_requests == 3

    view.report(ReplicaLoad(replica_id="a", queued_prompt_tokens=7))
    assert view.loads()["a"].queued_prompt_tokens == 7


def test_requests_that_a_report_does_not_include_are_still_added():
    view = LoadView()
    view.report(ReplicaLoad(replica_id="a"), num_received=0)
    for tokens in (30, 20, 10):
        view.sent("a", tokens)

    view.report(ReplicaLoad(replica_id="a"), num_received=2)

    assert view.loads()["a"].queued_prompt_tokens == 10


def test_removed_replicas_are_not_offered():
    view = LoadView()
    for name in "ab":
        view.report(ReplicaLoad(replica_id=name))
    view.remove("a")
    view.sent("a", 30)

    assert [*view.loads()] == ["b"]
