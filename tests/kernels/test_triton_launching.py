"""How kernels are shared out among processes that compile them."""

from types import SimpleNamespace

import torch

from onward.kernels.triton.kernel_launch import compile_share, launch


class Kernel:
    """Notes what it is asked for."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.compiled: list[tuple[object, ...]] = []
        self.run = "what launches it"
        self.params = [SimpleNamespace(do_not_specialize=False), SimpleNamespace(do_not_specialize=name == "c")]

    def warmup(self, *args: object, grid: tuple[int, ...], **options: object) -> "Kernel":
        self.compiled.append((*args, *options.items()))
        return self


def _compiled(part: int, of: int) -> list[tuple[object, ...]]:
    kernels = Kernel("a"), Kernel("b")
    x = torch.zeros(64)
    with compile_share(part, of):
        for number in (1, 2, 3, 16, 32):
            for kernel in kernels:
                launch(kernel, (1,), x, number, BLOCK=64)
        launch(kernels[0], (1,), x, 2, BLOCK=128)
        launch(kernels[0], (1,), x.to(torch.bfloat16), 2, BLOCK=64)
    return [(kernel.__name__, *args[1:]) for kernel in kernels for args in kernel.compiled]


def test_what_is_the_same_kernel_to_triton_is_compiled_once() -> None:
    # Ones, multiples of 16 and other numbers are kernels of their own; of each of them the first is taken.
    found = _compiled(0, 1)
    assert len(found) == 2 * 3 + 2
    assert ("a", 3, ("BLOCK", 64)) not in found


def test_a_number_that_no_kernel_is_made_for_makes_none() -> None:
    kernel = Kernel("c")
    with compile_share(0, 1):
        for number in (1, 3, 16):
            launch(kernel, (1,), torch.zeros(64), number, BLOCK=64)
    assert len(kernel.compiled) == 1


def test_every_kernel_is_somebodys_and_nobody_elses() -> None:
    shares = [_compiled(part, 3) for part in range(3)]
    assert sorted(map(str, (one for share in shares for one in share))) == sorted(map(str, _compiled(0, 1)))
