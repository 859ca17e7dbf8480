"""Gradients over two processes: the mean of all samples, or the sum, sparse where they are sparse."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.reducers import ProcessReducer
from tests.lightning.processes.test_processes import finish, start
from tests.reducers.process_program import ROWS, hook_case, sparse_cases

pytestmark = [pytest.mark.timeout(600), pytest.mark.processes]

PROGRAM = Path(__file__).with_name("process_program.py")
MODES = {"mean": (ROWS[0] / sum(ROWS), ROWS[1] / sum(ROWS)), "sum": (1.0, 1.0)}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes got, by case."""
    folder = tmp_path_factory.mktemp("internode")
    for printed in finish(start("all", folder, program=PROGRAM)):
        assert "ended well" in printed, printed
    return [torch.load(folder / f"seen_{rank}.pt", weights_only=True) for rank in range(2)]


def one_device(grads: list[torch.Tensor | None], weights: tuple[float, float]) -> torch.Tensor | None:
    """Summed in float64, in the dtype of the gradients."""
    present = [(g, weight) for g, weight in zip(grads, weights, strict=True) if g is not None]
    total = [(g.to_dense() if g.is_sparse else g).double() * weight for g, weight in present]
    return sum(total).to(present[0][0].dtype) if present else None  # type: ignore[union-attr]


def dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", sparse_cases())
def test_sparse_gradients_are_those_of_one_device_and_stay_sparse(
    case: str, mode: str, seen: list[dict[str, Any]]
) -> None:
    parameters, grads = sparse_cases()[case]
    ours, theirs = (results[f"{case} {mode}"] for results in seen)
    for index, own in enumerate(parameters):
        column = [row[index] for row in grads]
        expected = one_device(column, MODES[mode])
        if expected is None:
            assert ours[index] is theirs[index] is None
            continue
        present = [gradient for gradient in column if gradient is not None]
        assert ours[index].is_sparse is all(gradient.is_sparse for gradient in present)
        assert ours[index].dtype == own.dtype
        torch.testing.assert_close(dense(ours[index]), expected)
        torch.testing.assert_close(dense(theirs[index]), dense(ours[index]), rtol=0, atol=0)


def test_half_precision_is_weighted_and_summed_in_float32(seen: list[dict[str, Any]]) -> None:
    _, grads = sparse_cases()["bfloat16"]
    expected = one_device([gradient.float() for (gradient,) in grads], MODES["mean"])  # type: ignore[union-attr]
    (ours,) = seen[0]["bfloat16 mean"]
    assert torch.equal(ours.to_dense(), expected.bfloat16()), "rounded once"
    assert seen[0]["dense bfloat16"][0].tolist() == [1 + 2.0**-7] * 3


def test_sparse_values_travel_in_the_communication_dtype(seen: list[dict[str, Any]]) -> None:
    (sent,), (exact,) = seen[0]["different-numbers on bfloat16"], seen[0]["different-numbers mean"]
    assert sent.dtype == torch.float32
    assert not torch.equal(sent.to_dense(), exact.to_dense()), "rounded on the way"
    torch.testing.assert_close(sent.to_dense(), exact.to_dense(), rtol=2**-7, atol=1e-3)
    (sent,), (exact,) = seen[0]["bfloat16 on bfloat16"], seen[0]["bfloat16 mean"]
    assert torch.equal(sent.to_dense(), exact.to_dense()), "halves are summed in float32"


@pytest.mark.parametrize(("name", "digits"), [("plain", 1e-6), ("bf16", 2e-2), ("fp16", 2e-3), ("powersgd", 1e-5)])
def test_communication_hooks_average_by_samples(seen: list[dict[str, Any]], name: str, digits: float) -> None:
    parameters, steps = hook_case()
    total = sum(ROWS)
    for number, step in enumerate(steps):
        for rank in range(2):
            means = seen[rank]["hooks"][name][number]
            for index in range(len(parameters)):
                whole = one_device([row[index] for row in step], (ROWS[0] / total, ROWS[1] / total))
                mean = means[index]
                assert (mean is None) == (whole is None)
                # Two outer products that share a factor are of rank 1 together: PowerSGD loses nothing of the first.
                if whole is None or (name == "powersgd" and index > 0 and number > 1):
                    continue
                torch.testing.assert_close(mean, whole, rtol=digits, atol=digits)
    for one, other in zip(seen[0]["hooks"][name][-1], seen[1]["hooks"][name][-1], strict=True):
        assert one is other is None or torch.equal(one, other)


def test_a_communication_hook_can_sum(seen: list[dict[str, Any]]) -> None:
    _, steps = hook_case()
    whole = one_device([row[0] for row in steps[0]], (1.0, 1.0))
    torch.testing.assert_close(seen[0]["hooks"]["sum"][0][0], whole, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("sent_by", ["", ", hook"])
def test_a_process_without_tokens_adds_nothing_to_the_gradients_of_others(
    seen: list[dict[str, Any]], sent_by: str
) -> None:
    own, _ = seen[0]["without tokens"][f"rank 1{sent_by}"]
    of_rank_1, _ = seen[1]["without tokens"][f"rank 1{sent_by}"]
    assert all(bool(dense(gradient).isnan().any()) for gradient in of_rank_1)
    for rank in range(2):
        _, means = seen[rank]["without tokens"][f"rank 1{sent_by}"]
        for mean, gradient in zip(means, own, strict=True):
            torch.testing.assert_close(dense(mean), dense(gradient))


@pytest.mark.parametrize("sent_by", ["", ", hook"])
def test_a_mean_over_no_tokens_of_any_process_is_that_of_one_device(seen: list[dict[str, Any]], sent_by: str) -> None:
    for rank in range(2):
        own, means = seen[rank]["without tokens"][f"no rank{sent_by}"]
        assert [bool(dense(mean).isnan().any()) for mean in means] == [True, True]
        assert [bool(dense(gradient).isnan().any()) for gradient in own] == [True, True]
        own, means = seen[rank]["without tokens"]["ignored"]
        assert not own[0].any()
        assert torch.equal(means[0], own[0])


def test_nan_of_a_process_with_tokens_reaches_all(seen: list[dict[str, Any]]) -> None:
    for rank in range(2):
        _, means = seen[rank]["without tokens"]["diverged"]
        assert bool(means[0].isnan().all())


def test_a_notice_of_one_process_reaches_all(seen: list[dict[str, Any]]) -> None:
    assert [results["noticed"] for results in seen] == [[[1]], [[1]]]


@pytest.mark.filterwarnings("ignore:.*Sparse CSR.*:UserWarning")
def test_other_layouts_are_refused_by_name() -> None:
    rows = torch.eye(3).to_sparse_csr()
    with pytest.raises(dpx.UnsupportedError, match=r"Gradient 1 has layout torch.sparse_csr.*to_sparse_coo"):
        ProcessReducer().mean([None, rows], [torch.eye(3), torch.eye(3)], 1)
