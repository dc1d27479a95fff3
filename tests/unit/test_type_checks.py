"""Types and shapes of what tests call are checked: quire leaves that to them."""

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import TypeCheckError

from quire.engine.admission.need import Need, alike
from quire.kernels.sampling import apply_temperature


def test_shapes_are_checked_where_a_signature_has_them():
    logits = torch.zeros(2, 5)
    apply_temperature(logits, torch.ones(2))
    with pytest.raises(TypeCheckError, match="temperatures"):
        apply_temperature(logits, torch.ones(3))


def test_types_are_checked_where_there_are_no_shapes():
    assert len(list(alike([Need(1)]))) == 1
    with pytest.raises(BeartypeCallHintViolation, match="needs"):
        list(alike(Need(1)))
    with pytest.raises(BeartypeCallHintViolation, match="tokens"):
        Need("1")
