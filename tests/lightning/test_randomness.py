"""Dropout, activation checkpointing and reproducible runs, in every execution mode."""

import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dpx import DPXStrategy
from lightning_dpx.replicas import executor_choice
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer, places, run
from tests.lightning.by_hand import loss_or_step

pytestmark = pytest.mark.usefixtures("hardware")
GLOBAL_GENERATOR = np.random.RandomState(11)


class Dropped(Classifier):
    """With dropout, optionally recomputed in backward; keeps the masked activations of every slice."""

    def __init__(self, recompute: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3))
        self.recompute, self.reentrant = recompute, reentrant
        self.masks: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, labels = batch
        if self.recompute:
            rows = rows.requires_grad_(self.reentrant)
            hidden = checkpoint(self.net[:-1], rows, use_reentrant=self.reentrant)
        else:
            hidden = self.net[:-1](rows)
        self.masks.append((hidden.detach() == 0).cpu())
        return F.cross_entropy(self.net[-1](hidden), labels)


def train(execution: str, num_replicas: int = 3, *, seed: int = 7, deterministic: bool = False, **options: Any):
    seed_everything(seed, verbose=False)
    model = Dropped(**options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*draws random numbers from a generator.*")
        warnings.filterwarnings("ignore", message=".*non-reentrant.*")
        seen = run(
            model,
            strategy=DPXStrategy(execution=execution),
            devices=num_replicas,
            deterministic=deterministic,
        )
    torch.use_deterministic_algorithms(False)
    return seen, model.masks


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_dropout_has_the_same_masks(execution: str, reentrant: bool) -> None:
    plain, masks = train(execution)
    recomputed, same_masks = train(execution, recompute=True, reentrant=reentrant)
    assert_equal(recomputed, plain, bitwise=True)
    assert all(torch.equal(one, other) for one, other in zip(masks, same_masks, strict=True))


def test_a_seeded_run_repeats_bit_by_bit(execution: str) -> None:
    first, _ = train(execution, deterministic=True)
    assert_equal(train(execution, deterministic=True)[0], first, bitwise=True)
    other, _ = train(execution, seed=8)
    assert not torch.equal(other["net.0.weight"], first["net.0.weight"])


def test_threads_and_turns_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    # Sums that more threads share have other bits, so each of three replicas gets as many as the caller has.
    monkeypatch.setattr(executor_choice, "num_usable_cpus", lambda: 3 * torch.get_num_threads())
    threads, _ = train("threads", num_replicas=3)
    inline, _ = train("inline", num_replicas=3)
    assert_equal(threads, inline, bitwise=True)


def test_replicas_do_not_drop_the_same_units(execution: str) -> None:
    _, masks = train(execution, num_replicas=2)
    first, second = masks[0].cpu(), masks[1].cpu()
    assert not torch.equal(first, second)


@pytest.mark.host
def test_threads_that_were_asked_for_say_that_they_take_turns() -> None:
    trainer = make_trainer(max_epochs=1, strategy=DPXStrategy(execution="threads"), devices=2)
    with pytest.warns(UserWarning, match="training_step draws random numbers .* its replicas take turns"):
        trainer.fit(Dropped(), make_loader(), make_loader())


def test_a_seed_that_the_user_gave_a_device_stays(hardware: str) -> None:
    if hardware == "cpu":
        pytest.skip("one generator")
    sim = torch.get_device_module("sim")
    with sim.device(1):
        sim.manual_seed(1234)
    DPXStrategy(parallel_devices=[torch.device(place) for place in places(2)])
    make_trainer(strategy="dpx", devices=2, fast_dev_run=True).fit(Dropped(), make_loader(), make_loader())
    with sim.device(1):
        assert sim.initial_seed() == 1234


class Holder:
    """An object of one's own that holds a generator."""

    def __init__(self) -> None:
        self.generator = np.random.RandomState(12)


def draw_from_a_global(module: Any) -> float:
    return float(GLOBAL_GENERATOR.rand())


DRAWS: dict[str, Callable[[Any], float]] = {
    "numpy": lambda module: float(np.random.beta(0.4, 0.4)),
    "python": lambda module: random.random(),
    "attribute": lambda module: float(module.generator.random()),
    "item": lambda module: module.several[0].random(),
    "helper": lambda module: float(module.holder.generator.rand()),
    "global": draw_from_a_global,
    "torch": lambda module: torch.rand(1, generator=module.own).item(),
}


DRAWN: list[float] = []  # no attribute of the module: a step that writes those is never tried in threads


class MixedUp(Classifier):
    """Mixes its batch with a random weight; its operators are large enough to consider threads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        np.random.seed(3)
        random.seed(4)
        GLOBAL_GENERATOR.seed(11)
        self.net = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 256), nn.Linear(256, 3))
        self.draw, self.holder = DRAWS[kind], Holder()
        self.generator, self.several = np.random.default_rng(5), [random.Random(6)]
        self.own = torch.Generator().manual_seed(7)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        weight = self.draw(self)
        DRAWN.append(weight)
        rows = weight * batch[0] + (1 - weight) * batch[0].square()
        return F.cross_entropy(self.net(rows), batch[1])


def mixed_up(kind: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = MixedUp(kind)
    DRAWN.clear()
    loader = make_loader(2048, 1024)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*draws random numbers from a generator.*")
        warnings.filterwarnings("ignore", message=".*: DRAWN is .+1 items on one device")
        make_trainer(max_epochs=2, **options).fit(model, loader, make_loader(16))
    return list(DRAWN), {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.host
@pytest.mark.parametrize("kind", list(DRAWS))
def test_a_default_run_draws_what_one_device_draws(kind: str) -> None:
    weights, state = mixed_up(kind)
    our_weights, our_state = mixed_up(kind, strategy="dpx", devices=2)
    assert our_weights == weights
    assert_equal(our_state, state)


@pytest.mark.host
@pytest.mark.parametrize("kind", ["numpy", "attribute"])
def test_a_profiled_run_draws_what_one_device_draws(kind: str) -> None:
    _, state = mixed_up(kind)
    _, our_state = mixed_up(kind, strategy=DPXStrategy(memory_budget="1GiB"), devices=2)
    assert_equal(our_state, state)


@pytest.mark.parametrize("kind", ["numpy", "python", "attribute", "global"])
def test_threads_take_turns_where_any_generator_is_drawn_from(kind: str) -> None:
    in_line, state = mixed_up(kind, strategy=DPXStrategy(execution="inline"), devices=2)
    in_threads, our_state = mixed_up(kind, strategy=DPXStrategy(execution="threads"), devices=2)
    assert in_threads == in_line
    assert_equal(our_state, state, bitwise=True)


class DecidesByDraw(Classifier):
    """What decides for the whole batch is drawn once for it: how far to scale, which branch to take."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(5)
        self.of_torch = torch.Generator().manual_seed(6)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scale = np.random.uniform(0.5, 1.5) + self.generator.random() + float(torch.rand((), generator=self.of_torch))
        logits = self.net(batch[0])
        if random.random() < 0.5:
            logits = logits.relu()
        if float(torch.rand(())) < 0.5:
            logits = logits * 2
        loss = F.cross_entropy(logits, batch[1]) * scale
        self.log("scale", scale)
        return loss


class DecidesWithoutDropout(DecidesByDraw):
    """Draws for the whole batch in evaluations, beside a dropout that is off there."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_scale", torch.rand(()) * self.dropout(self.net(batch[0])).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.dropout(self.net(batch[0])) * torch.rand(())


def test_dropout_that_is_off_hides_no_draw_of_an_evaluation(execution: str) -> None:
    def evaluated(**options: Any) -> tuple[Any, torch.Tensor]:
        seed_everything(3, verbose=False)
        model = DecidesWithoutDropout()
        trainer = make_trainer(**options)
        tested = trainer.test(model, make_loader(53), verbose=False)
        return tested[0]["test_scale"], torch.cat(trainer.predict(model, make_loader(53)))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*draws random numbers from a generator.*")
        ours = evaluated(strategy=DPXStrategy(execution=execution), devices=2)
    one = evaluated()
    assert ours[0] == pytest.approx(one[0])
    torch.testing.assert_close(ours[1], one[1])


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_what_a_step_draws_for_its_batch_is_drawn_once(execution: str, num_replicas: int) -> None:
    def fitted(**options: Any) -> tuple[dict[str, torch.Tensor], float, float]:
        seed_everything(3, verbose=False)
        model = DecidesByDraw()
        trainer = make_trainer(**options)
        trainer.fit(model, make_loader(53), make_loader(53))
        values = {name: value.cpu() for name, value in model.state_dict().items()}
        return values, float(trainer.callback_metrics["scale"]), random.random()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*draws random numbers from a generator.*")
        ours = fitted(strategy=DPXStrategy(execution=execution), devices=num_replicas)
    one = fitted()
    assert_equal(ours[0], one[0])
    assert ours[1:] == pytest.approx(one[1:])


class ScalesOnItsDevice(Classifier):
    """Draws a number for its batch from the generator of its device."""

    def __init__(self, *, by_hand: bool, drops: bool) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        self.drops = drops

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = batch[0] * torch.rand((), device=self.device)
        loss = F.cross_entropy(self.net(F.dropout(rows, 0.3) if self.drops else rows), batch[1])
        return loss_or_step(self, loss)


def trained_by_own_draws(num_replicas: int, execution: str, **options: bool) -> dict[str, torch.Tensor]:
    seed_everything(3, verbose=False)
    model = ScalesOnItsDevice(**options)
    trainer = make_trainer(strategy=DPXStrategy(execution=execution), devices=num_replicas)
    trainer.fit(model, make_loader(53), make_loader(53))
    return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:.*draws random numbers from a generator")
@pytest.mark.filterwarnings("ignore:.*It draws random numbers once")
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_what_a_device_draws_for_its_batch_is_that_of_the_first(
    execution: str, num_replicas: int, by_hand: bool, drops: bool
) -> None:
    ours = trained_by_own_draws(num_replicas, execution, by_hand=by_hand, drops=drops)
    assert_equal(ours, trained_by_own_draws(1, execution, by_hand=by_hand, drops=drops))


class DropsPositions(Classifier):
    """Dropout of rows, and of something that all rows have in common, as embeddings of relative positions."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        common = F.dropout(torch.ones(8, device=self.device), 0.3)
        return F.cross_entropy(self.net(F.dropout(batch[0], 0.3) + common), batch[1])


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("place", ["sim", "cpu"])
def test_dropout_of_what_rows_have_in_common_leaves_all_slices_at_work(
    sim: Any, caplog: Any, place: str, micro_batches: int
) -> None:
    strategy = DPXStrategy(execution="inline", micro_batches=micro_batches)
    trainer = make_trainer(strategy=strategy, devices=2, accelerator=place)
    with caplog.at_level("INFO"):
        trainer.fit(DropsPositions(), make_loader(53), make_loader(53))
    assert "whole" not in caplog.text
    assert re.search("checked on .* training_step", caplog.text)


class MixesOnce(Classifier):
    """Scales its batch by a number that is drawn once, beside a dropout or by hand."""

    def __init__(self, draw: Callable[[], float], *, by_hand: bool, drops: bool) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        self.draw = draw
        self.drops = drops

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = batch[0] * self.draw()
        if self.drops:
            # On the host, as the number is: on a device it would have that one's generator.
            rows = F.dropout(rows.cpu(), 0.3).to(self.device)
        loss = F.cross_entropy(self.net(rows), batch[1])
        return loss_or_step(self, loss)


def draw_by_torch() -> float:
    return torch.rand(()).item()


def draw_by_numpy() -> float:
    return float(np.random.rand())


@pytest.mark.parametrize(
    ("draw", "by_hand", "drops"),
    [(draw_by_torch, False, True), (draw_by_torch, True, False), (draw_by_numpy, True, False)],
)
def test_what_is_drawn_once_for_a_batch_that_slices_cannot_share_is_drawn_for_the_whole(
    draw: Callable[[], float], by_hand: bool, drops: bool
) -> None:
    def trained(**options: Any) -> dict[str, torch.Tensor]:
        seed_everything(3, verbose=False)
        model = MixesOnce(draw, by_hand=by_hand, drops=drops)
        make_trainer(**options).fit(model, make_loader(), make_loader())
        return {name: value.cpu() for name, value in model.state_dict().items()}

    expected = trained()
    with pytest.warns(UserWarning, match="It draws random numbers once for its batch"):
        seen = trained(strategy=DPXStrategy(execution="inline"), devices=2)
    assert_equal(seen, expected)


class MixesWithItsFlip(Classifier):
    """What slices draw alike explains no difference: a slice turned round is not a part of the batch turned round."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        share = draw_by_numpy()
        return F.cross_entropy(self.net(share * batch[0] + (1 - share) * batch[0].flip(0)), batch[1])


def test_a_difference_beside_a_shared_draw_is_told_and_not_laid_to_it() -> None:
    with pytest.warns(UserWarning, match="the loss is .* on one device"):
        make_trainer(strategy=DPXStrategy(execution="inline"), devices=2).fit(
            MixesWithItsFlip(), make_loader(), make_loader()
        )


class WeighsByDraws(Classifier):
    """Draws for each row how much it counts, and may divide by what the batch has of that."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.back = nn.Linear(3, 8)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, labels = batch
        losses = F.cross_entropy(self.net(rows), labels, reduction="none")
        match self.kind:
            case "kept rows":
                kept = torch.rand(len(rows), 1, device=self.device).squeeze(1) < 0.7
                return losses[kept].sum() / kept.sum().clamp(min=1)
            case "masked items":
                hidden = torch.bernoulli(torch.full_like(rows, 0.4)).bool()
                guesses = self.back(self.net(rows.masked_fill(hidden, 0.0)))
                return ((guesses - rows) ** 2)[hidden].mean()
            case "rewards of the batch":
                # Of a policy, which draws what it does.
                logits = self.net(rows)
                done = torch.multinomial(logits.softmax(1), 1).squeeze(1)
                rewards = (done == labels).float()
                return (F.cross_entropy(logits, done, reduction="none") * (rewards - rewards.mean())).mean()
            case "weights over the batch":
                weights = 1.0 + torch.randint(50, (len(rows),), device=self.device)
                return (losses * weights / weights.mean()).mean()
        # Each row of itself alone: dropout, noise, and a weight that no other row changes.
        noise = torch.randn_like(rows)
        weights = 1.0 + torch.randint(50, (len(rows),), device=self.device)
        logits = self.net(F.dropout(rows + noise))
        done = torch.multinomial(logits.softmax(1), 1).squeeze(1)
        self.log("done", done.float().mean())
        return (F.cross_entropy(logits, done, reduction="none") * weights).mean()


def assert_loss_is_told(module: Any, options: dict[str, Any]) -> None:
    """A check says that its loss is not that of one device; with so many devices and micro-batches."""
    seed_everything(11, verbose=False)
    strategy = DPXStrategy(execution="inline", micro_batches=options.get("micro_batches", 1))
    trainer = make_trainer(strategy=strategy, devices=options["devices"])
    with pytest.warns(UserWarning, match="the loss is .* on one device"):
        trainer.fit(module, make_loader(53), make_loader(53))


@pytest.mark.parametrize("kind", ["kept rows", "masked items", "rewards of the batch", "weights over the batch"])
@pytest.mark.parametrize("options", [{"devices": 2}, {"devices": 1, "micro_batches": 3}], ids=str)
def test_a_mean_over_what_rows_draw_is_told(kind: str, options: dict[str, Any]) -> None:
    """Where all rows draw alike, it is a mean over rows; each row of the run draws its own."""
    # Of a few rows none may be left out by chance: the batches that are looked at later draw other numbers.
    assert_loss_is_told(WeighsByDraws(kind), options)


def test_what_a_row_draws_for_itself_alone_is_as_on_one_device(caplog: pytest.LogCaptureFixture) -> None:
    seed_everything(3, verbose=False)
    trainer = make_trainer(max_epochs=1, strategy=DPXStrategy(execution="inline"), devices=2)
    with warnings.catch_warnings(), caplog.at_level("INFO"):
        warnings.filterwarnings("error", message="dpx: .* is not what it is on one device")
        trainer.fit(WeighsByDraws("its own"), make_loader(53), make_loader(53))
    assert re.search("checked on .* loss, .* logged value.* as on one device .*training_step", caplog.text)


class NoiseForSomeRows(Classifier):
    """Draws for the rows that it selects, of which slices have fewer."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, labels = batch
        chosen = rows[:, 0] > 0
        selected = rows[chosen]
        logits = self.net(selected + torch.randn_like(selected))
        return F.cross_entropy(logits, labels[chosen], reduction="sum") / len(rows)


@pytest.mark.parametrize("options", [{"devices": 2}, {"devices": 1, "micro_batches": 3}], ids=str)
def test_what_is_drawn_for_a_part_of_the_rows_is_no_difference(options: dict[str, Any]) -> None:
    """They have other places in slices than in the batch: what they draw by their places is no other step."""
    seed_everything(11, verbose=False)
    strategy = DPXStrategy(execution="inline", micro_batches=options.get("micro_batches", 1))
    trainer = make_trainer(max_epochs=1, strategy=strategy, devices=options["devices"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="dpx: .* is not what it is on one device")
        trainer.fit(NoiseForSomeRows(), make_loader(106), make_loader(53))


class MasksTokens(Classifier):
    """Draws which tokens of its rows count, of all of them in one dim, or with the time first.

    Args:
        kind: Of them.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, labels = batch
        num_rows, num_tokens = len(rows), 5
        # Of one row all tokens have another loss.
        steps = torch.arange(1.0, num_tokens + 1, device=self.device)
        losses = F.cross_entropy(
            self.net(rows[:, None] * steps[:, None]).flatten(0, 1),
            labels.repeat_interleave(num_tokens),
            reduction="none",
        )
        by_row = losses.view(num_rows, num_tokens)
        match self.kind:
            case "flattened":
                is_masked = torch.rand(num_rows * num_tokens, device=self.device) < 0.4
                return losses[is_masked].mean()
            case "time first":
                is_masked = torch.rand(num_tokens, num_rows, device=self.device) < 0.4
                return by_row.T[is_masked].mean()
            case "weights of flattened rows":
                weights = torch.rand(num_rows * num_tokens, 1, device=self.device)[:, 0]
                return (losses * weights).mean()
            case "weights of time first":
                weights = torch.rand(num_tokens, num_rows, device=self.device)
                return (by_row.T * weights).mean()
            case "flattened weights of time first":
                weights = torch.rand(num_tokens * num_rows, device=self.device)
                return (by_row.T.flatten() * weights).mean()
        # Of two views one after the other, each of which is flattened.
        weights = torch.rand(2 * num_rows * num_tokens, device=self.device)
        first, second = weights.view(2, -1)
        return (losses * first * second).mean()


@pytest.mark.parametrize("kind", ["flattened", "time first"])
@pytest.mark.parametrize("options", [{"devices": 2}, {"devices": 1, "micro_batches": 3}], ids=str)
def test_a_mean_over_what_tokens_draw_is_told(kind: str, options: dict[str, Any]) -> None:
    assert_loss_is_told(MasksTokens(kind), options)


@pytest.mark.parametrize(
    "kind",
    ["weights of flattened rows", "weights of time first", "flattened weights of time first", "weights of two views"],
)
def test_what_tokens_draw_for_their_row_alone_is_as_on_one_device(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    seed_everything(3, verbose=False)
    trainer = make_trainer(max_epochs=1, strategy=DPXStrategy(execution="inline"), devices=2)
    with warnings.catch_warnings(), caplog.at_level("INFO"):
        warnings.filterwarnings("error", message="dpx: .* is not what it is on one device")
        trainer.fit(MasksTokens(kind), make_loader(53), make_loader(53))
    assert re.search("checked on .* loss, .* as on one device .*training_step", caplog.text)
