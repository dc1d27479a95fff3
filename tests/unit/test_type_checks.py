"""The type and shape checks of the test suite detect violations."""

import gc
import inspect
import random
import types
from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from quire.kernels.sampling import apply_temperature
from quire.scheduler.peaks import Need, group_needs
from quire.scheduler.schedule_config import ScheduleConfig
from support.scheduler_load import make_scheduler
from support.small_memory import one_group
from support.type_checks import ALL_CALLS, FIRST, restart_sampling

WRONG = (BeartypeCallHintViolation, TypeCheckError)
checked = jaxtyping.jaxtyped(typechecker=beartype)


@checked
def doubled(numbers: Float[Tensor, " n"], *, wrong: bool = False) -> Float[Tensor, " n"]:
    return torch.cat([numbers, numbers]) if wrong else numbers * 2


@checked
def tail(numbers: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    if len(numbers) > 1:
        tail(numbers[1:])  # n has another size in this call
    return numbers


@checked
def first(numbers: Float[Tensor, " n"], count: int, most: int) -> Float[Tensor, " {count}"]:
    return numbers[:most]


@checked
def by_name(left: "Float[Tensor, ' n']", right: "Float[Tensor, ' n']") -> "Float[Tensor, ' n']":
    return left + right


def test_types_shapes_and_axis_sizes_of_quire_are_checked():
    logits = torch.zeros(2, 5)
    apply_temperature(logits, torch.ones(2))
    with pytest.raises(WRONG, match="temperatures"):
        apply_temperature(logits, torch.ones(3))

    assert len(list(group_needs([Need(1)]))) == 1
    with pytest.raises(WRONG, match="needs"):
        list(group_needs(Need(1)))
    restart_sampling()
    with pytest.raises(WRONG, match="tokens"):
        Need("1")

    doubled(torch.ones(3))
    with pytest.raises(WRONG):
        doubled(torch.ones(3), wrong=True)
    assert len(tail(torch.ones(3))) == 3
    by_name(torch.ones(3), torch.ones(3))
    with pytest.raises(WRONG):
        by_name(torch.ones(1), torch.ones(3))
    assert len(first(torch.ones(3), 2, 2)) == 2
    with pytest.raises(WRONG):
        first(torch.ones(3), 2, 1)


@checked
def with_unknown_type(number: "Unknown", count: int) -> "Unknown":
    return number


def test_unresolvable_annotation_is_not_checked():
    assert with_unknown_type(1, 2) == 1
    with pytest.raises(WRONG, match="count"):
        with_unknown_type(1, "2")


@pytest.mark.skipif(ALL_CALLS, reason="every call is checked")
@pytest.mark.parametrize("num_calls_before", range(FIRST + 2))
def test_the_first_calls_after_a_restart_are_checked(num_calls_before):
    for _ in range(num_calls_before):
        doubled(torch.ones(3))
    restart_sampling()
    for _ in range(FIRST):
        with pytest.raises(WRONG):
            doubled(torch.ones(3), wrong=True)
    assert len(doubled(torch.ones(3), wrong=True)) == 6


@pytest.mark.skipif(ALL_CALLS, reason="every call is checked")
def test_calls_are_checked_again_after_steps_of_powers_of_two():
    scheduler = make_scheduler(one_group(), ScheduleConfig())
    checked_steps = []
    for step in range(1, 20):
        scheduler.schedule()
        for _ in range(FIRST - 1):
            doubled(torch.ones(3))
        try:
            doubled(torch.ones(3), wrong=True)
        except WRONG:
            checked_steps.append(step)

    assert checked_steps == [1, 2, 4, 8, 16]


@checked
def sizes(items: list[int]) -> int:
    return len(items)


def test_the_same_items_of_lists_are_checked_in_every_run():
    runs = []
    for _ in range(2):
        restart_sampling()
        random.random()  # others use this generator
        found = []
        for _ in range(FIRST):
            try:
                sizes([1] * 2 + ["2"] * 2)
                found.append(True)
            except WRONG:
                found.append(False)
        runs.append(found)

    assert runs[0] == runs[1]
    assert set(runs[0]) == {True, False}


@checked
def numbers_to(*ends: int) -> Iterator[int]:
    yield from range(*ends)


@pytest.mark.skipif(ALL_CALLS, reason="every call is checked")
def test_a_restart_while_a_call_of_a_generator_begins_checks_no_wrong_call():
    def restart(phase: str, _info: dict[str, int]) -> None:
        if phase == "stop":
            restart_sampling()

    for _ in range(FIRST):
        list(numbers_to(1))
    thresholds = gc.get_threshold()
    gc.callbacks.append(restart)
    gc.set_threshold(1, 1)  # the tuple of arguments collects
    try:
        results = [numbers_to(1) for _ in range(600)]
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(restart)

    assert {type(result) for result in results} == {types.GeneratorType}


class Base:
    def size(self) -> int:
        return 10


class Derived(Base):
    @checked
    def size(self, more: int = 1, *, times: int = 2) -> int:
        return super().size() * times + more


@pytest.mark.parametrize("num_calls", [1, FIRST + 1])
def test_a_checked_method_keeps_its_signature_defaults_and_super(num_calls):
    for _ in range(num_calls):
        assert Derived().size() == 21
        assert Derived().size(3, times=1) == 13
    restart_sampling()
    assert [*inspect.signature(Derived.size).parameters] == ["self", "more", "times"]
    with pytest.raises(WRONG, match="more"):
        Derived().size("3")
