"""GPTQ, AWQ and SmoothQuant as tensor maths, compared with slow textbook versions and with the outputs themselves."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from backend_engine.quantization.calibrated.awq import MAX_FACTOR, MIN_FACTOR, best_factors, kindest_to_compensation
from backend_engine.quantization.calibrated.gptq import round_with_compensation
from backend_engine.quantization.calibrated.rounding_error import output_error, round_to_nearest
from backend_engine.quantization.calibrated.smoothquant import smoothing_factors
from backend_engine.quantization.grids.float8_grid import Float8Grid
from backend_engine.quantization.grids.int_grid import IntGrid
from backend_engine.quantization.grids.nvfp4_grid import Nvfp4Grid
from backend_engine.quantization.grids.weight_grid import Scales, WeightGrid


@dataclass(frozen=True)
class SmallGrid(WeightGrid):
    """Codes 0 to ``num_codes - 1``, with a scale, and a zero if asymmetric, from the range of each group."""

    group_size: int | None = 8  # type: ignore[assignment]
    is_symmetric: bool = True
    num_codes: int = 8

    bits = 3.0  # type: ignore[assignment]
    packing = "none"  # type: ignore[assignment]

    def problem_with(self, in_features: int) -> str | None:
        return None

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Scales:
        grouped = weight.unflatten(1, (-1, self.group_size or weight.shape[1]))
        if self.is_symmetric:
            # A little off the middle between two codes, where the largest weights would be ties.
            return Scales(grouped.abs().amax(-1).clamp_min(1e-8) / (self.num_codes / 2 - 0.6))
        low = grouped.amin(-1).clamp_max(0)
        scale = (grouped.amax(-1).clamp_min(0) - low).clamp_min(1e-8) / (self.num_codes - 1)
        return Scales(scale, (-low / scale).round())

    def round(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        zero = torch.full_like(scale, self.num_codes / 2) if zero is None else zero
        return ((weight / scale).round().add(zero).clamp(0, self.num_codes - 1) - zero) * scale

    def leaves(self, rounded: Tensor, scales: Scales) -> dict[str, Tensor]:
        return {}

    def weights_config(self) -> dict[str, Any]:
        return {}


GRIDS = [SmallGrid(), SmallGrid(is_symmetric=False), SmallGrid(None), SmallGrid(None, False)]


def correlated(seed: int, in_features: int = 48, num_tokens: int = 400) -> Tensor:
    """Inputs ``[num_tokens, in_features]`` of which each channel shares much with the others, at sizes of their own."""
    rng = torch.Generator().manual_seed(seed)
    few = torch.randn(num_tokens, max(in_features // 4, 1), generator=rng)
    mixed = few @ torch.randn(few.shape[1], in_features, generator=rng)
    own = torch.randn(num_tokens, in_features, generator=rng)
    return (mixed + own) * torch.rand(in_features, generator=rng).add(0.1)


def random_weight(seed: int, rows: int = 16, in_features: int = 48) -> Tensor:
    return torch.randn(rows, in_features, generator=torch.Generator().manual_seed(seed + 1000))


def hessian_of(inputs: Tensor) -> Tensor:
    return inputs.T @ inputs / len(inputs)


def output_loss(difference: Tensor, inputs: Tensor) -> float:
    """What ``output_error`` says it is, from the outputs: the squared error of a token, summed over rows."""
    outputs = inputs.double() @ difference.double().T
    return float(outputs.square().sum(1).mean())


def textbook(weight: Tensor, hessian: Tensor, grid: WeightGrid, scales: Scales, damping: float) -> Tensor:
    """Optimal brain quantization in a fixed order, with an explicit inverse that loses a column at each step, float64.

    Columns that never had an input are rounded to their nearest.
    """
    left, hessian = weight.double(), hessian.double()
    rounded = torch.zeros_like(left)
    group_size = grid.group_size or weight.shape[1]
    alive = [i for i in range(len(hessian)) if hessian[i, i] > 0]
    mean = sum(float(hessian[i, i]) for i in alive) / max(len(alive), 1)
    inverse = torch.zeros_like(hessian)
    block = hessian[alive][:, alive] + damping * mean * torch.eye(len(alive), dtype=torch.float64)
    inverse[torch.tensor(alive)[:, None], torch.tensor(alive)] = torch.linalg.inv(block)
    for i in sorted(range(len(hessian)), key=lambda i: -float(hessian[i, i])):
        scale = scales.scale[:, i // group_size].double()
        zero = None if scales.zero is None else scales.zero[:, i // group_size].double()
        rounded[:, i] = grid.round(left[:, i], scale, zero)
        if i in alive:
            left -= ((left[:, i] - rounded[:, i]) / inverse[i, i])[:, None] * inverse[i]
            inverse -= torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return rounded


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_compensation_loses_less_of_the_output_than_rounding_to_the_nearest(grid: SmallGrid, seed: int) -> None:
    inputs, weight = correlated(seed), random_weight(seed)
    scales = grid.fit(weight)
    got = round_with_compensation(weight, hessian_of(inputs), grid, scales)
    plain = output_loss(round_to_nearest(weight, grid, scales) - weight, inputs)
    compensated = output_loss(got.rounded - weight, inputs)
    assert compensated < 0.7 * plain
    assert got.relative_error == pytest.approx(compensated / output_loss(weight, inputs), rel=1e-4)
    assert got.damping == 0.01


@pytest.mark.parametrize(
    "grid",
    [
        IntGrid(4, 32),
        IntGrid(4, 32, is_symmetric=False, scale_dtype=torch.bfloat16),
        IntGrid(8, scale_dtype=torch.float16),
        Float8Grid(),
        Nvfp4Grid(),
    ],
    ids=str,
)
def test_compensation_on_the_grids_that_are_stored(grid: WeightGrid) -> None:
    inputs, weight = correlated(15, 160), random_weight(15, 24, 160)
    hessian = hessian_of(inputs)
    scales = grid.fit(weight, hessian.diagonal())
    got = round_with_compensation(weight, hessian, grid, scales).rounded
    plain = round_to_nearest(weight, grid, scales)
    assert output_loss(got - weight, inputs) < 0.5 * output_loss(plain - weight, inputs)
    assert grid.leaves(got, scales), "it checks that all numbers are of the grid"
    quick = dataclasses.replace(grid, clip_search=False) if isinstance(grid, IntGrid) else grid
    factors = best_factors([weight], hessian, inputs.abs().mean(0), quick, 5)
    losses = [factor_loss([weight], inputs, tried, quick) for tried in (factors, torch.ones(160))]
    assert losses[0] < losses[1]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("in_features", [8, 128, 296])
def test_compensation_is_optimal_brain_quantization(grid: SmallGrid, in_features: int) -> None:
    inputs, weight = correlated(5, in_features), random_weight(5, 12, in_features)
    inputs[:, 3] = 0
    hessian, scales = hessian_of(inputs), grid.fit(weight)
    given = weight.clone(), hessian.clone()
    got = round_with_compensation(weight, hessian, grid, scales, 0.02).rounded
    expected = textbook(weight, hessian, grid, scales, 0.02)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-4)
    assert torch.equal(weight, given[0]) and torch.equal(hessian, given[1]), "what is given is not changed"
    assert torch.equal(got[:, 3], round_to_nearest(weight, grid, scales)[:, 3])
    assert not torch.equal(got, round_to_nearest(weight, grid, scales))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
def test_inputs_that_share_nothing_leave_nothing_to_compensate(grid: SmallGrid, size: float) -> None:
    weight = random_weight(1, in_features=144)
    scales = grid.fit(weight)
    got = round_with_compensation(weight, torch.eye(144) * size, grid, scales)
    assert torch.equal(got.rounded, round_to_nearest(weight, grid, scales))
    assert got.relative_error == pytest.approx(float((got.rounded - weight).square().sum() / weight.square().sum()))


def test_the_order_of_the_columns_makes_no_difference() -> None:
    rng = torch.Generator().manual_seed(7)
    inputs, weight = correlated(7, 160), random_weight(7, in_features=160)
    for grid in GRIDS:
        size = grid.group_size or 160
        groups = torch.randperm(160 // size, generator=rng)
        order = torch.cat([group * size + torch.randperm(size, generator=rng) for group in groups])
        hessian, scales = hessian_of(inputs), grid.fit(weight)
        moved = Scales(*(None if t is None else t[:, groups] for t in scales[:2]))  # type: ignore[arg-type]
        straight = round_with_compensation(weight, hessian, grid, scales).rounded
        shuffled = round_with_compensation(weight[:, order], hessian[order][:, order], grid, moved).rounded
        assert torch.equal(shuffled, straight[:, order])


def test_rows_are_rounded_independently_and_the_size_of_the_hessian_does_not_count() -> None:
    grid = SmallGrid(is_symmetric=False)
    weight, hessian = random_weight(8), hessian_of(correlated(8))
    scales = grid.fit(weight)
    whole = round_with_compensation(weight, hessian, grid, scales)
    few = round_with_compensation(weight[3:7], hessian, grid, Scales(*(t[3:7] for t in scales[:2] if t is not None)))
    assert torch.equal(few.rounded, whole.rounded[3:7])
    summed = round_with_compensation(weight, hessian * 512, grid, scales)
    assert torch.equal(summed.rounded, whole.rounded)
    assert summed.relative_error == pytest.approx(whole.relative_error, rel=1e-5)
    assert torch.equal(round_to_nearest(whole.rounded, grid, scales), whole.rounded), "numbers of the grid"


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_columns_that_never_had_an_input_are_rounded_to_their_nearest(grid: SmallGrid) -> None:
    inputs, weight = correlated(9), random_weight(9)
    dead = torch.zeros(48, dtype=torch.bool)
    dead[[0, 5, 6, 20, 47]] = True
    inputs[:, dead] = 0
    scales = grid.fit(weight)
    plain = round_to_nearest(weight, grid, scales)
    got = round_with_compensation(weight, hessian_of(inputs), grid, scales)
    assert torch.equal(got.rounded[:, dead], plain[:, dead])
    assert output_loss(got.rounded - weight, inputs) < output_loss(plain - weight, inputs)
    nothing = round_with_compensation(weight, torch.zeros(48, 48), grid, scales)
    assert torch.equal(nothing.rounded, plain)
    assert nothing.relative_error == 0.0 and nothing.damping is None


@pytest.mark.parametrize(
    ("shared", "damping"), [(0.5, 0.01), (1.05, 0.1), (1.5, 1.0), (2.5, None)], ids=lambda value: str(value)
)
def test_damping_is_raised_until_the_hessian_is_positive_definite(shared: float, damping: float | None) -> None:
    grid, weight = SmallGrid(), random_weight(10, in_features=16)
    hessian = torch.eye(16)
    hessian[2, 11] = hessian[11, 2] = shared
    scales = grid.fit(weight)
    got = round_with_compensation(weight, hessian, grid, scales)
    assert got.damping == damping
    if damping is None:
        assert torch.equal(got.rounded, round_to_nearest(weight, grid, scales))
    else:
        expected = textbook(weight, hessian, grid, scales, damping)
        torch.testing.assert_close(got.rounded.double(), expected, rtol=0, atol=1e-4)


def test_inputs_of_rank_one_are_no_trouble() -> None:
    grid, weight = SmallGrid(), random_weight(11)
    inputs = torch.randn(200, 1) @ correlated(11)[:1]
    got = round_with_compensation(weight, hessian_of(inputs), grid, grid.fit(weight))
    plain = output_loss(round_to_nearest(weight, grid, grid.fit(weight)) - weight, inputs)
    assert output_loss(got.rounded - weight, inputs) < 0.2 * plain


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(value: float) -> None:
    grid, weight, hessian = SmallGrid(), random_weight(12), hessian_of(correlated(12))
    scales, mean_abs, damaged = grid.fit(weight), torch.ones(48), torch.tensor(value)
    with pytest.raises(ValueError, match="NaN or infinity in the statistics of its inputs"):
        round_with_compensation(weight, hessian.index_fill(0, torch.tensor(4), value), grid, scales)
    with pytest.raises(ValueError, match="NaN or infinity in the weight"):
        round_with_compensation(weight.index_fill(0, torch.tensor(4), value), hessian, grid, scales)
    with pytest.raises(ValueError, match="NaN or infinity in the statistics"):
        best_factors([weight], hessian, mean_abs * damaged, grid)
    with pytest.raises(ValueError, match="NaN or infinity in the inputs"):
        smoothing_factors(mean_abs * damaged, [weight])
    with pytest.raises(ValueError, match="NaN or infinity in the weights"):
        smoothing_factors(mean_abs, [weight, weight * damaged])


def run_gptq() -> Tensor:
    weight, hessian = random_weight(13), hessian_of(correlated(13))
    grid = SmallGrid(is_symmetric=False)
    return round_with_compensation(weight, hessian, grid, grid.fit(weight)).rounded


def run_awq() -> Tensor:
    inputs = correlated(13)
    return best_factors([random_weight(13)], hessian_of(inputs), inputs.abs().mean(0), SmallGrid(), 4)


def run_smoothquant() -> Tensor:
    return smoothing_factors(correlated(13).abs().amax(0), [random_weight(13)])


@pytest.mark.parametrize("run", [run_gptq, run_awq, run_smoothquant])
def test_everything_is_computed_where_the_tensors_are(run: Callable[[], Tensor], monkeypatch: Any) -> None:
    """A new tensor that does not ask for the device of the given ones lands on ``meta`` here, and mixing fails."""
    expected = run()
    given = random_weight(13), correlated(13)
    monkeypatch.setitem(globals(), "random_weight", lambda seed: given[0])
    monkeypatch.setitem(globals(), "correlated", lambda seed: given[1])
    with torch.device("meta"):
        got = run()
    assert got.device.type == "cpu" and torch.equal(got, expected)


def with_outliers(seed: int, in_features: int = 48) -> Tensor:
    """Inputs of which a few channels are far larger than the others, as those of large language models."""
    inputs = correlated(seed, in_features)
    inputs[:, torch.randperm(in_features, generator=torch.Generator().manual_seed(seed))[:3]] *= 30
    return inputs


def factor_loss(weights: list[Tensor], inputs: Tensor, factors: Tensor, grid: WeightGrid) -> float:
    """The error of the outputs, computed from outputs, of weights that were rounded with the factors in them."""
    loss = 0.0
    for weight in weights:
        scaled = weight * factors
        loss += output_loss(round_to_nearest(scaled, grid, grid.fit(scaled)) / factors - weight, inputs)
    return loss


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("num_steps", [1, 10])
@pytest.mark.parametrize("seed", range(3))
def test_awq_takes_the_best_power_of_the_inputs_magnitudes(grid: SmallGrid, seed: int, num_steps: int) -> None:
    """Of one step the powers are 0 and 1, and with outliers 1 is better on most grids."""
    inputs = with_outliers(seed)
    weights = [random_weight(seed), random_weight(seed + 50, rows=5)]
    mean_abs = inputs.abs().mean(0)
    given = [weight.clone() for weight in weights]
    factors = best_factors(weights, hessian_of(inputs), mean_abs, grid, num_steps)
    assert all(map(torch.equal, weights, given))
    tried = [mean_abs.double().pow(i / num_steps) for i in range(num_steps + 1)]
    tried = [power / (power.max() * power.min()).sqrt() for power in tried]
    losses = [factor_loss(weights, inputs, power.float(), grid) for power in tried]
    torch.testing.assert_close(factors.double(), tried[losses.index(min(losses))], rtol=1e-5, atol=0)
    if num_steps > 1:
        assert min(losses) < 0.9 * losses[0]
    torch.testing.assert_close(
        (inputs / factors) @ (weights[0] * factors).T, inputs @ weights[0].T, rtol=1e-4, atol=1e-2
    )


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_awq_is_never_worse_than_no_factors(grid: SmallGrid, seed: int) -> None:
    """Magnitudes that say nothing of the inputs make bad factors, of which none are taken."""
    inputs, weight = correlated(seed), random_weight(seed)
    misleading = torch.rand(48, generator=torch.Generator().manual_seed(seed)).pow(8)
    factors = best_factors([weight], hessian_of(inputs), misleading, grid)
    plain = factor_loss([weight], inputs, torch.ones(48), grid)
    assert factor_loss([weight], inputs, factors, grid) <= plain * (1 + 1e-5)


def test_awq_takes_no_factors_where_none_help() -> None:
    weight, hessian = random_weight(3), hessian_of(correlated(3))
    assert torch.equal(best_factors([weight], hessian, torch.full((48,), 0.3), SmallGrid()), torch.ones(48))
    assert torch.equal(best_factors([weight], hessian, torch.zeros(48), SmallGrid()), torch.ones(48))
    inputs = torch.tensor([1.0, 5.0]).repeat(24)
    assert torch.equal(best_factors([weight], torch.zeros(48, 48), inputs, SmallGrid()), torch.ones(48))


@pytest.mark.parametrize("smallest", [0.0, 1e-45, 1e-30, 1e-10])
def test_awq_factors_stay_within_bounds(smallest: float) -> None:
    inputs = with_outliers(4)
    inputs[:, 1:9] = 0
    mean_abs = inputs.abs().mean(0) * 1e30
    mean_abs[1:9] = smallest
    factors = best_factors([random_weight(4)], hessian_of(inputs), mean_abs, SmallGrid())
    assert factors.isfinite().all() and factors.min() >= MIN_FACTOR and factors.max() <= MAX_FACTOR
    if smallest == 0:
        alive = torch.cat([factors[:1], factors[9:]])
        assert alive.max() > alive.min() and torch.equal(factors[1:9], alive.min().expand(8))


@pytest.mark.parametrize("seed", range(4))
def test_factors_that_do_not_help_compensation_are_left_alone(seed: int) -> None:
    """Whichever of the three leaves the least error when the weight is rounded with compensation."""
    hessian, weights = hessian_of(correlated(seed)), [random_weight(seed), random_weight(seed + 50)]
    grid = SmallGrid()

    def error(factors: Tensor) -> float:
        scaled = hessian / factors / factors.unsqueeze(1)
        rounded = [round_with_compensation(w * factors, scaled, grid, grid.fit(w * factors)).rounded for w in weights]
        return sum(output_error(r - w * factors, scaled) for r, w in zip(rounded, weights, strict=True))

    offered = torch.linspace(0.05, 20, 48)[torch.randperm(48, generator=torch.Generator().manual_seed(seed))]
    chosen = kindest_to_compensation(offered, weights, hessian, grid)
    errors = {name: error(f) for name, f in (("ones", torch.ones(48)), ("roots", offered.sqrt()), ("all", offered))}
    assert error(chosen) == min(errors.values()), errors
    assert max(errors.values()) > 1.05 * min(errors.values()), "nothing to choose"


def test_smoothquant_by_hand() -> None:
    weights = [torch.tensor([[1.0, -2.0], [0.5, 0.0]]), torch.tensor([[[-0.25, 1.0]], [[0.0, -4.0]]])]
    assert smoothing_factors(torch.tensor([4.0, 9.0]), weights).tolist() == [2.0, 1.5]
    assert smoothing_factors(torch.tensor([4.0, 9.0]), weights, 1.0).tolist() == [4.0, 9.0]
    assert smoothing_factors(torch.tensor([4.0, 9.0]), weights, 0.0).tolist() == [1.0, 0.25]
    assert smoothing_factors(torch.tensor([0.0, 1e20]), weights).tolist() == [1.0, MAX_FACTOR]
    assert smoothing_factors(torch.tensor([1e-20, 0.0]), weights).tolist() == [pytest.approx(MIN_FACTOR), 1.0]
    assert smoothing_factors(torch.tensor([4.0, 9.0]), [weights[0] * torch.tensor([0.0, 1.0])]).tolist()[0] == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_smoothquant_shares_the_range_and_leaves_the_product(seed: int) -> None:
    inputs = with_outliers(seed)
    weights = [random_weight(seed), random_weight(seed + 50, rows=5)]
    factors = smoothing_factors(inputs.abs().amax(0), weights)
    smooth, stiff = inputs / factors, [weight * factors for weight in weights]
    torch.testing.assert_close(smooth.abs().amax(0), torch.cat(stiff).abs().amax(0), rtol=1e-5, atol=0)
    for weight, scaled in zip(weights, stiff, strict=True):
        exact = inputs.double() @ weight.double().T
        torch.testing.assert_close((smooth.double() @ scaled.double().T), exact, rtol=1e-4, atol=1e-2)
        better = int8_product(smooth, scaled) - exact
        assert better.square().mean() < 0.5 * (int8_product(inputs, weight) - exact).square().mean()


def int8_product(inputs: Tensor, weight: Tensor) -> Tensor:
    """Both rounded to eight bits by their rows."""
    rounded = []
    for tensor in (inputs, weight):
        scale = tensor.double().abs().amax(1, keepdim=True) / 127
        rounded.append((tensor.double() / scale).round() * scale)
    return rounded[0] @ rounded[1].T


def test_the_error_of_the_output_is_that_of_the_outputs() -> None:
    inputs, difference = correlated(6), random_weight(6)
    assert output_error(difference, hessian_of(inputs)) == pytest.approx(output_loss(difference, inputs), rel=1e-5)
    assert output_error(difference, torch.zeros(48, 48)) == 0.0
