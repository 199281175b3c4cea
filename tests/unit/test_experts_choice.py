"""Fetch or compute: the split is the fastest there is, ranks agree on it, and its times are what a clock says."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.experts import choice, host
from shardwise.experts.choice import Choice, Trial, fetch_or_compute
from tests.kernels.weights import FORMATS, make_weight

CPU = torch.device("cpu")
TIMES = st.floats(0, 1, allow_subnormal=False)
CHOICES = st.builds(
    Choice,
    fetch_start_s=TIMES,
    fetch_s=TIMES,
    compute_start_s=TIMES,
    compute_s=TIMES,
    contention=st.floats(1, 3),
    overlap=st.booleans(),
    misses=st.integers(1, 12),
)


@given(CHOICES, st.integers(0, 40))
def test_a_split_is_no_slower_than_any_other(made: Choice, misses: int) -> None:
    """Either alone among them; of those that are equally fast it fetches the most."""
    fetched = made.split(misses)
    best_s = min(made.seconds(misses, other) for other in range(misses + 1))
    assert made.seconds(misses, fetched) == best_s
    assert all(made.seconds(misses, other) > best_s for other in range(fetched + 1, misses + 1))
    assert made.table(misses)[misses] == fetched


def test_a_split_is_in_proportion_to_the_rates() -> None:
    made = Choice(0, 1.0, 0, 3.0, 1.0, True, 8)
    assert [made.split(misses) for misses in range(9)] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    assert made.seconds(8, 6) == 6.0
    assert made.name == "hybrid"


@pytest.mark.parametrize(
    ("made", "name", "split"),
    [
        (Choice(0, 1.0, 0, 100.0, 1.0, True, 8), "offload", 8),  # a slow CPU
        (Choice(0, 1.0, 0, 0.1, 1.0, True, 8), "hybrid", 0),  # a slow bus
        (Choice(0, 1.0, 0, 0.1, 1.0, True, 8, 3.0), "hybrid", 0),  # so slow that graphs do not make up for it
        (Choice(0, 1.0, 0, 0.1, 1.0, True, 8, 5.0), "offload", 0),  # here they do
        (Choice(0, 1.0, 0, 2.0, 1.6, True, 8), "offload", 8),  # they are in each other's way
        (Choice(0, 1.0, 50.0, 0.1, 1.0, True, 8), "offload", 8),  # the way to the CPU is long
        (Choice(0, 1.0, 7.0, 0.1, 1.0, True, 8), "offload", 7),  # it pays for a token that misses all, and barely
        (Choice(0, 1.0, 0, 0.9, 1.0, False, 8), "hybrid", 0),  # one after the other: the faster
        (Choice(0, 1.0, 0, 1.1, 1.0, False, 8), "offload", 8),
        (Choice(0, 0.0, 0, 0.0, 1.0, True, 8), "offload", 8),
    ],
)
def test_the_choice(made: Choice, name: str, split: int) -> None:
    assert made.name == name
    assert made.split(8) == split


def test_ranks_agree_on_the_slowest() -> None:
    """One rank has the slow bus, the other the slow CPU; an int crosses, so that all compute with the same numbers."""
    ranks = [Choice(0.1, 0.3, 0.2, 0.01, 1.25, True, 8), Choice(0.2, 0.1 + 1e-12, 0.1, 0.5, 1.0, True, 6)]
    answers = list[int]()

    def first(value: int) -> int:
        answers.append(value)
        return value

    ranks[0].agreed(first)
    others = iter(answers)
    found = ranks[1].agreed(lambda value: min(value, next(others)))
    assert found == Choice(0.2, 0.3, 0.2, 0.5, 1.25, True, 6)
    assert Choice(0, 1, 0, 1, 1, True, 4).agreed(lambda value: min(value, 0)).overlap is False


class Clock:
    """Time that passes only by what is done: copies run beside, computing in the caller."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fetch_s: float, compute_s: float, start_s: float) -> None:
        self.now_s, self.busy_until_s, self.contended = 0.0, 0.0, 1.0
        self.fetch_s, self.compute_s, self.start_s = fetch_s, compute_s, start_s
        self.fetched, self.computed = list[int](), list[int]()
        monkeypatch.setattr(choice.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(host, "compute", self.compute)

    def fetch(self, experts: Sequence[int]) -> None:
        self.fetched += experts
        self.busy_until_s = self.now_s + self.start_s + self.fetch_s * len(experts)

    def wait(self) -> None:
        self.now_s = max(self.now_s, self.busy_until_s)

    def compute(self, x, gate_up, down, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor, threads: int) -> torch.Tensor:
        assert threads == 3
        self.computed += ids_Tk.flatten().tolist()
        slower = self.contended if self.busy_until_s > self.now_s else 1.0
        self.now_s += (self.start_s + self.compute_s * ids_Tk.numel()) * slower
        return torch.zeros(x.shape)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    return lambda fetch_s, compute_s, start_s=0.0: Clock(monkeypatch, fetch_s, compute_s, start_s)


def bank(experts: int = 16, form: str = "fp8_block"):
    return make_weight((experts, 32, 16), form), make_weight((experts, 16, 16), form, 1)


def chosen(made: Clock, misses: int = 8, seconds: float = 1.0, overlap: bool = True) -> Choice:
    """On a device that is a GPU as far as overlap goes."""
    device = torch.device("meta") if overlap else CPU
    trial_device = CPU
    with pytest.MonkeyPatch.context() as patch:
        real = choice.Trial
        patch.setattr(choice, "Trial", lambda a, b, _, *rest: real(a, b, trial_device, *rest))
        return fetch_or_compute(*bank(), device, 3, misses=misses, seconds=seconds, fetch=made.fetch, wait=made.wait)


def test_times_are_measured(clock: Callable[..., Clock]) -> None:
    made = clock(0.001, 0.003, 0.002)
    found = chosen(made)
    times = found.fetch_start_s, found.fetch_s, found.compute_start_s, found.compute_s, found.contention
    assert times == pytest.approx((0.002, 0.001, 0.002, 0.003, 1.0))
    assert found.name == "hybrid"
    assert (found.split(8), found.misses) == (6, 8)
    assert set(made.fetched) | set(made.computed) == set(range(16)), "others each time"
    assert made.now_s < 1.3


def test_contention_is_measured(clock: Callable[..., Clock]) -> None:
    made = clock(0.001, 0.003)
    made.contended = 2.0
    found = chosen(made)
    assert found.contention == pytest.approx(2.0)
    assert found.name == "offload"


def test_on_a_cpu_nothing_runs_beside(clock: Callable[..., Clock]) -> None:
    found = chosen(clock(0.001, 0.003), overlap=False)
    assert (found.name, found.overlap, found.seconds(8, 4)) == ("offload", False, pytest.approx(0.016))


@pytest.mark.parametrize("slow_s", [0.4, 30.0])
def test_a_slow_machine_is_measured_once(clock: Callable[..., Clock], slow_s: float) -> None:
    made = clock(0.001, slow_s)
    found = chosen(made, misses=1)
    assert made.now_s < 5 * 0.2 + 2 * slow_s
    assert (found.misses, found.name) == (1, "offload")
    assert found.compute_s == pytest.approx(slow_s)


def test_never_more_experts_than_there_are(clock: Callable[..., Clock]) -> None:
    assert chosen(clock(0.001, 0.002), misses=99).misses == 16


@pytest.mark.parametrize(("one_s", "most_s"), [(2.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1.0, 20.0)])
def test_noise_makes_no_negative_times(one_s: float, most_s: float) -> None:
    start_s, each_s = choice._line(one_s, most_s, 8)
    assert start_s >= 0
    assert each_s >= 0
    assert start_s + 8 * each_s == pytest.approx(most_s)


@pytest.mark.parametrize("form", FORMATS)
def test_a_real_layer(form: str) -> None:
    """What a trial fetches are the experts' slices, of every format; all of it in the time that it was given."""
    gate_up, down = bank(4, form)
    found = fetch_or_compute(gate_up, down, CPU, 1, misses=2, seconds=0.02)
    assert found.misses == 2
    assert found.seconds(2, 2) > 0
    assert found.seconds(2, 0) > 0
    trial = Trial(gate_up, down, CPU, 1, 2)
    trial.run(1, 0)
    trial.run(2, 0)
    for tensor, slots in trial._slots:
        assert torch.equal(slots.view(torch.uint8), tensor[1:3].contiguous().view(torch.uint8))
    per_expert = sum(slots.nbytes for _, slots in trial._slots) // 2
    assert per_expert > 0.9 * (gate_up.nbytes + down.nbytes) / 4
