"""Work that one thread hands to another, and where its result goes."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.errors import EngineDead, QuireError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Command(Generic[T]):
    """Work for the engine's thread, and where its result goes."""

    work: Callable[[], T]
    future: "Future[T]"

    def run(self) -> None:
        """Do it, and hand its result over; what is no refusal is raised here too."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.work()
        except QuireError as error:  # a refusal: its caller's business only
            self.future.set_exception(error)
        except BaseException as error:
            self.future.set_exception(error)
            raise
        else:
            self.future.set_result(result)

    def refuse(self, error: EngineDead) -> None:
        """Say that it will not be done."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
