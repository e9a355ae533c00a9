"""The library's products are used only where they have the bits of ours. On the CPU, with the products of its library."""

import pytest
import torch

from onward.kernels.triton.library_matmul import (
    LibraryMatmuls,
    Product,
    default_matmul,
    fastest_matmul,
    matmul_without_split_k,
)


def _tensors(rows: int = 96) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    buffer = torch.randn(rows, 64)
    return buffer, torch.randn(48, 64), torch.zeros(rows, 48)


class Reference:
    """A product that is off in one element of those computed in one call, or in none."""

    def __init__(self, *, is_off: bool) -> None:
        self.num_calls = 0
        self._is_off = is_off

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        self.num_calls += 1
        default_matmul(x, weight, out)
        if self._is_off and self.num_calls == 5:
            out[-1, -1] = torch.nextafter(out[-1, -1], torch.tensor(torch.inf))


def second_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    default_matmul(x, weight, out)


WAYS = (default_matmul, second_product)


def test_an_equal_product_is_used() -> None:
    assert LibraryMatmuls(Reference(is_off=False), WAYS).find_bit_equal(*_tensors()) is default_matmul


def test_one_differing_element_in_any_trial_rules_a_product_out() -> None:
    # The fifth comparison of the first product fails, and none of the second one's.
    assert LibraryMatmuls(Reference(is_off=True), WAYS).find_bit_equal(*_tensors()) is second_product


def test_no_product_is_used_where_all_differ() -> None:
    def reference(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(x @ weight.T, 1.001, out=out)

    assert LibraryMatmuls(reference, WAYS).find_bit_equal(*_tensors()) is None


def test_each_size_is_tried_once_and_with_16_million_elements() -> None:
    reference = Reference(is_off=False)
    products = LibraryMatmuls(reference, WAYS)
    for rows in (96, 96, 32):
        products.find_bit_equal(*_tensors(rows))
    assert reference.num_calls == -(-(1 << 24) // (96 * 48)) + -(-(1 << 24) // (32 * 48))


@pytest.mark.gpu
@pytest.mark.parametrize("product", [matmul_without_split_k, fastest_matmul])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(96, 48, 64), (112, 4096, 12288), (113, 4096, 12288)])
def test_a_product_of_the_library_is_right_and_leaves_settings_of_torch_as_they_were(
    product: Product, rows: int, outputs: int, inputs: int
) -> None:
    def settings() -> tuple[object, ...]:
        matmul = torch.backends.cuda.matmul
        return (
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction_split_k,
            torch.backends.cuda.preferred_blas_library(),
        )

    before = settings()
    x, weight = (torch.randn(count, inputs, device="cuda", dtype=torch.bfloat16) for count in (rows, outputs))
    out = torch.full((rows, outputs), torch.nan, device="cuda", dtype=torch.bfloat16)
    product(x, weight, out)
    expected = x.double() @ weight.double().T
    assert (out.double() - expected).norm() / expected.norm() < 1e-2
    assert settings() == before
