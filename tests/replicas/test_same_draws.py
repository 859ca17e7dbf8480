"""Random numbers that are the same for every row, and parameters that come back to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lightning_dpx.replicas.drawn_rows import DrawnRows
from lightning_dpx.replicas.same_draws import Draw, SameDraws, SharedParameters

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": F.dropout,
    "dropout in place": lambda x: F.dropout(x, inplace=True),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli of a tensor": lambda x: torch.empty_like(x).bernoulli_(torch.full_like(x, 0.5)),
    "rand": lambda x: torch.rand(x.shape),
    "randn like": torch.randn_like,
    "randint": lambda x: torch.randint(9, x.shape),
    "randint from": lambda x: torch.randint(3, 9, x.shape),
    "normal": lambda x: torch.empty_like(x).normal_(1.0, 2.0),
    "normal of tensors": lambda x: torch.normal(x, torch.ones_like(x)),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "choices": lambda x: torch.multinomial(x, 16, replacement=True),
    "an order": lambda x: torch.multinomial(x, 16),
}


def nothing_shared() -> SharedParameters:
    return SharedParameters([])


@pytest.mark.parametrize("name", DRAWS)
def test_all_rows_draw_the_same_numbers_and_a_slice_those_of_the_whole(name: str) -> None:
    found = []
    for num_rows in (6, 2):
        torch.manual_seed(0)
        with SameDraws(nothing_shared()) as mode:
            found.append(DRAWS[name](torch.ones(num_rows, 16)))
        assert mode.drew
    whole, part = found
    assert bool((whole == whole[0]).all())
    assert torch.equal(whole[:2], part)
    assert whole[0].unique().numel() > 1, "numbers of one row differ"


@pytest.mark.parametrize("name", DRAWS)
def test_rows_that_draw_for_themselves_draw_by_their_place_in_a_slice(name: str) -> None:
    sizes = (3, 2, 2)
    found = []
    for num_rows in (sum(sizes), *sizes):
        torch.manual_seed(0)
        with SameDraws(nothing_shared(), sizes):
            found.append(DRAWS[name](torch.ones(num_rows, 16)))
    whole, *parts = found
    assert torch.equal(whole, torch.cat(parts))
    assert parts[0].unique(dim=0).shape == (3, 16), "rows of a slice differ"


@pytest.mark.parametrize("replacement", [False, True])
def test_a_choice_is_made_by_the_probabilities_of_its_row(replacement: bool) -> None:
    wanted = torch.tensor([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]])
    seen = torch.zeros(2, 4)
    for seed in range(32):
        torch.manual_seed(seed)
        with SameDraws(nothing_shared(), (1, 1)) as mode:
            chosen = torch.multinomial(wanted, 2, replacement=replacement)
        assert not mode.left_alone
        seen.scatter_(1, chosen, 1.0)
    assert torch.equal(seen, wanted), "each that can be, and none that cannot"


def test_a_choice_among_rows_is_left_alone() -> None:
    with SameDraws(nothing_shared()) as mode:
        torch.multinomial(torch.ones(5), 2)
    assert "aten.multinomial" in mode.left_alone


def test_what_is_no_row_draws_alike_in_all_slices() -> None:
    """Three features beside a slice of three rows, and as many as all slices have."""
    for size in (3, 5, 7):
        found = []
        for _ in range(3):
            torch.manual_seed(0)
            with SameDraws(nothing_shared(), (3, 2)):
                found.append(torch.rand(size))
        assert all(torch.equal(one, found[0]) for one in found)


# How rows of five steps are drawn for, and how what was drawn has its rows first again.
LAYOUTS: dict[str, tuple[DrawnRows, int, Callable[[int], tuple[int, ...]], Callable[[torch.Tensor], torch.Tensor]]] = {
    "time first": (DrawnRows((5, 0), 1, 1), 1, lambda rows: (5, rows), lambda drawn: drawn.T),
    "flattened": (DrawnRows((0,), 0, 5), 1, lambda rows: (rows * 5,), lambda drawn: drawn.view(-1, 5)),
    "flattened, time first": (DrawnRows((0,), 0, 5), 5, lambda rows: (5 * rows,), lambda drawn: drawn.view(5, -1).T),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_draw_by_their_place_wherever_they_lie(name: str) -> None:
    rows, parts, shape, rows_first = LAYOUTS[name]
    sizes = (3, 2)
    found = []
    for num_rows in (sum(sizes), *sizes):
        torch.manual_seed(0)
        with SameDraws(nothing_shared(), sizes, [rows], parts) as mode:
            found.append(rows_first(torch.rand(shape(num_rows))))
        assert mode.places == [num_rows]
        assert mode.draws == [5]
    whole, *slices = found
    assert torch.equal(whole, torch.cat(slices))
    assert slices[0].unique().numel() == 15, "each draws its own"


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_draw_alike_wherever_they_lie(name: str) -> None:
    rows, _, shape, rows_first = LAYOUTS[name]
    found = []
    for num_rows in (5, 3):
        torch.manual_seed(0)
        with SameDraws(nothing_shared(), (), [rows]) as mode:
            found.append(rows_first(torch.rand(shape(num_rows))))
        assert mode.places == [0]
    whole, part = found
    assert bool((whole == whole[0]).all())
    assert torch.equal(whole[:3], part)


def test_dropout_of_few_features_never_drops_all_of_them() -> None:
    """Zeros would be equal in slices and as one device, whatever the step does with them."""
    for seed in range(32):
        torch.manual_seed(seed)
        with SameDraws(nothing_shared()):
            kept = torch.nn.functional.dropout(torch.ones(4, 2), 0.5)
        assert bool(kept.any())
        assert torch.equal(kept, kept[:1].expand_as(kept))


@torch.library.custom_op(
    "dpx_tests::drops_and_tells_its_seed", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def drops_and_tells_its_seed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * torch.rand_like(x).gt(0.5), torch.ones(2)


def test_a_seed_that_is_returned_beside_what_was_drawn_is_no_draw() -> None:
    with SameDraws(nothing_shared()) as mode:
        drops_and_tells_its_seed(torch.ones(4, 3))
    assert mode.on_host == [Draw(12)]


OFF: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "feature dropout": lambda x: F.dropout2d(x, 0.5, training=False),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=False),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
}


@pytest.mark.parametrize("name", OFF)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_dropout_that_is_off_draws_nothing(name: str, context: Callable[[], Any]) -> None:
    with context(), SameDraws(nothing_shared()) as mode:
        OFF[name](torch.ones(1, 2, 3, 16))
    assert not mode.drew
    assert not mode.on_host


@pytest.mark.parametrize("name", DRAWS)
def test_inference_mode_draws_the_same_numbers_as_training(name: str) -> None:
    found = []
    for context in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        with context(), SameDraws(nothing_shared()) as mode:
            found.append(DRAWS[name](torch.ones(6, 16)))
        assert mode.drew
        assert not mode.left_alone
    assert torch.equal(*found)


def test_draws_that_mix_rows_are_left_alone_and_named() -> None:
    with SameDraws(nothing_shared()) as mode:
        assert torch.randperm(8).sort().values.tolist() == list(range(8))
    assert not mode.drew
    assert list(mode.left_alone) == ["aten.randperm"]


def test_the_dtypes_of_a_step_are_noticed() -> None:
    numbers = torch.ones(2, dtype=torch.float64)
    with SameDraws(nothing_shared()) as mode:
        numbers.bfloat16().sort()
    assert mode.dtypes == {torch.bfloat16, torch.int64}


def test_a_parameter_that_an_operator_wrote_comes_back_to_the_bit() -> None:
    weight = torch.rand(3, generator=torch.Generator().manual_seed(0))
    before = weight.clone()
    shared = SharedParameters([("weight", weight), ("other", torch.ones(2))])
    with SameDraws(shared):
        weight.view(3, 1).mul_(2)  # through a view of the same storage
    assert shared.written == ["weight"]
    assert not torch.equal(weight, before)
    shared.restore()
    assert torch.equal(weight, before)
    assert shared.written == []


def test_for_how_many_rows_numbers_are_drawn_by_their_places() -> None:
    """What is neither a slice nor the batch, such as rows that a condition selects, has no places."""
    with SameDraws(nothing_shared(), [4, 3]) as mode:
        for rows in (7, 4, 3, 5):
            torch.rand(rows, 2)
    assert mode.places == [7, 4, 3, 0]
    with SameDraws(nothing_shared()) as mode:
        torch.rand(7, 2)
    assert mode.places == [0], "all rows draw alike"
