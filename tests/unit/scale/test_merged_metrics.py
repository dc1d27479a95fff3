"""Merged metrics against the parser of prometheus-client."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from quire.scale.serve.gateway import LABEL, merged_metrics


def metrics(value, labels):
    registry = CollectorRegistry()
    Gauge("plain", "without labels", registry=registry).set(value)
    Histogram("seconds", "with buckets", registry=registry).observe(value)
    counter = Counter("requests", "with labels", ["path"], registry=registry)
    for label in labels:
        counter.labels(label).inc(value)
    return generate_latest(registry).decode()


def samples(text, **more):
    return {
        (sample.name, *sorted((sample.labels | more).items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(
    st.dictionaries(
        st.sampled_from(["r1", 'r"2', "r\\3", "r 4"]),
        st.tuples(st.integers(0, 9), st.lists(st.text(' {}",=a\n\\', max_size=4), unique=True)),
        min_size=1,
    )
)
def test_every_sample_has_its_replica(given):
    texts = {replica: metrics(*content) for replica, content in given.items()}

    merged = merged_metrics(texts)

    wanted = {}
    for replica, text in texts.items():
        wanted |= samples(text, **{LABEL: replica})
    assert samples(merged) == wanted
    names = [line.split(" ")[2] for line in merged.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
