"""What tenants are charged and credited with when their requests leave and come again."""

from quire.config.sampling_params import SamplingParams
from quire.kv import prefix_key
from quire.kv.memory import KVMemory
from quire.kv.prefix import PrefixIndex
from quire.scheduler.components import make_components
from quire.scheduler.fairness import FORGET_FROM
from quire.scheduler.prefix_sharing import PrefixSharing
from quire.scheduler.request import Request
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence_memory import SequenceMemory
from quire.scheduler.step import StepPlan
from quire.tenancy import meter
from quire.tenancy.meter import OTHERS
from support.requests import make_request
from unit.scheduler.scheduler_load import make_layout

PAGE_TOKENS = 2


class Service:
    """A scheduler over room for everybody, with a prefix cache where it is asked for."""

    def __init__(self, *, prefix=False, **schedule):
        layout = make_layout(PAGE_TOKENS, None, evicting=False)
        self.memory = KVMemory(layout, 400 * layout.smallest_sequence_bytes, 8)
        self.index = PrefixIndex(self.memory) if prefix else None
        config = ScheduleConfig(**schedule)
        sequence_memory = SequenceMemory(PrefixSharing(self.memory, self.index))
        self.scheduler = Scheduler(make_components(config, sequence_memory))
        self.arrivals = 0

    def submit(self, prompt_tokens=6, max_tokens=8, **options) -> Request:
        self.arrivals += 1
        request = make_request(
            request_id=f"r{self.arrivals}",
            prompt_token_ids=list(range(prompt_tokens)),
            params=SamplingParams(max_tokens=max_tokens),
            arrival=self.arrivals,
            **options,
        )
        self.scheduler.submit(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.commit(plan)
        for request in plan.requests:
            if request.num_uncomputed == 0:
                request.output_token_ids.append(2)
        return plan

    def numbers(self, tenant):
        report = self.scheduler.fairness.report(self.scheduler.running)
        return next(row for row in report if row.tenant == tenant)


def test_an_answer_that_is_read_again_is_charged_once():
    service = Service(tenants="a;b")
    request = service.submit(tenant="a")
    for _ in range(4):
        service.step()
    before, paid = service.numbers("a"), service.scheduler.waiting.virtual_time("a")

    assert service.scheduler.preempt_one()  # it is thrown out with three tokens of its answer
    service.step()  # and read again: one of these tokens has not been processed yet

    after = service.numbers("a")
    assert request.progress.num_preemptions == 1
    assert request.progress.num_computed == 6 + 4
    assert (before.prompt_tokens, before.output_tokens) == (6, 3)
    assert (after.prompt_tokens, after.output_tokens) == (7, 3)
    assert service.scheduler.waiting.virtual_time("a") == paid + 1


def test_cached_tokens_of_a_prompt_count_once_however_often_it_enters():
    service = Service(prefix=True, tenants="a;b")
    service.submit(tenant="a")
    service.step()
    second = service.submit(tenant="a")
    service.step()
    assert second.progress.cached_tokens == 4

    assert service.scheduler.preempt_one()
    service.step()

    assert second.progress.num_admissions == 2
    assert service.numbers("a").cached_tokens == 4


def test_a_request_that_is_refused_again_and_again_is_hashed_once(monkeypatch):
    hashes, plain = [0], prefix_key._block

    def counting(*block):
        hashes[0] += 1
        return plain(*block)

    service = Service(prefix=True)
    first = service.submit(prompt_tokens=60)
    service.step()
    waiting = service.submit(prompt_tokens=61)
    service.scheduler.waiting.pop(waiting)
    monkeypatch.setattr(prefix_key, "_block", counting)
    sequence_memory = service.scheduler.sequence_memory
    for _ in range(5):  # what the entrance does with it while there is no room
        lease = sequence_memory.sharing.look_up(waiting)
        assert lease.tokens == 60
        sequence_memory.sharing.release(lease)
    assert hashes[0] == 60 // PAGE_TOKENS

    service.scheduler.waiting.push(waiting)
    service.step()
    assert first.progress.cached_tokens == 0
    assert waiting.progress.cached_tokens == 60
    assert waiting.memory.chain is None  # it grows from here


def test_a_prompt_that_became_public_is_hashed_anew():
    service = Service(prefix=True)
    mine = service.submit(prompt_tokens=20, tenant="mine")
    sequence_memory = service.scheduler.sequence_memory
    identities = sequence_memory.sharing.identities
    sequence_memory.sharing.release(sequence_memory.sharing.look_up(mine))
    before = mine.memory.chain

    identities.register_public(list(range(10)))
    sequence_memory.sharing.release(sequence_memory.sharing.look_up(mine))

    assert mine.memory.chain is not before
    assert mine.memory.chain.identity.public_tokens == 10


def test_a_server_whose_clients_invent_names_does_not_grow(monkeypatch):
    monkeypatch.setattr(meter, "IDLE_KEPT", 20)
    service = Service()
    for number in range(300):
        request = service.submit(tenant=f"user-{number}", max_tokens=1)
        service.step()
        service.scheduler.finish(request)

    fairness, rows = service.scheduler.fairness, service.scheduler.fairness.report([])
    assert fairness.waiting.num_tracked <= 2 * FORGET_FROM
    assert len(rows) == 20 + 2  # the last one is still taken for busy
    assert rows[-1].tenant == OTHERS
    assert sum(row.num_requests for row in rows) == 300
    assert sum(row.prompt_tokens for row in rows) == 300 * 6
    assert not fairness.accounts.held_bytes("user-0")


def test_who_is_alone_again_has_nobody_to_be_fair_to():
    service = Service()
    mine = service.submit(tenant="mine")
    assert not service.scheduler.fairness.has_several

    theirs = service.submit(tenant="theirs")
    assert service.scheduler.fairness.has_several  # before the first step
    service.step()
    assert service.scheduler.fairness.has_several
    assert service.numbers("mine").held_bytes == service.numbers("theirs").held_bytes > 0

    service.scheduler.finish(theirs)
    service.step()
    assert not service.scheduler.fairness.has_several
    assert service.numbers("mine").held_bytes == service.memory.row_bytes(mine.memory.row)
    assert service.numbers("theirs").held_bytes == 0


def test_only_answers_that_ended_by_themselves_teach_how_long_answers_are():
    service = Service(admission="estimated")
    cancelled, ended = service.submit(), service.submit()
    service.step()

    service.scheduler.finish(cancelled, "cancelled")
    assert service.scheduler.components.admission_rule.ratio == 1

    service.scheduler.finish(ended)
    assert service.scheduler.components.admission_rule.ratio < 1
